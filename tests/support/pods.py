"""A pod without Kubernetes: the first process of its namespaces, with files and user of a manifest.

Namespaces of processes and mounts, a root directory in which /onward, /config, /tmp, /dev/shm and the home of
the user are new, no capabilities, and only the environment that a container gets.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.support.ranks import ROOT
from tests.support.workshop import until

NEEDED = ("unshare", "setpriv", "chroot", "mount")

BOOT = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs {root}
for each in /*; do
    case $each in
        /proc|/root|/tmp|/dev|/home|/onward|/config) ;;
        *) if [ -L "$each" ]; then cp -P "$each" {root}/; elif [ -d "$each" ]; then
               mkdir {root}$each; mount --rbind "$each" {root}$each
           fi ;;
    esac
done
mkdir -p {root}/proc {root}/tmp {root}/dev {root}/onward {root}/config {root}/home/onward {root}{python}
mount -t proc proc {root}/proc
mount --rbind /dev {root}/dev
mount -t tmpfs tmpfs {root}/dev/shm
mount --bind {home} {root}/onward
mount --bind {files} {root}/config
mountpoint -q {root}{python}/bin || mount --bind {python} {root}{python}
chmod 1777 {root}/tmp {root}/dev/shm
chown {user} {root}/home/onward
cd {root}
exec chroot {root} setpriv --reuid={user} --regid={user} --clear-groups --no-new-privs --inh-caps=-all \\
    --bounding-set=-all env -i {environment} {command}
"""


def missing() -> str:
    """Why there can be no pods here; "" if there can."""
    if absent := [name for name in NEEDED if not shutil.which(name)]:
        return f"pods need {', '.join(absent)}"
    allowed = subprocess.run(["unshare", "--pid", "--fork", "--mount", "true"], capture_output=True)
    return "pods need root: they are namespaces" if os.geteuid() or allowed.returncode else ""


def start_pod(pod: dict[str, Any], files: dict[str, str], volume: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Start the one container of a pod. pod: its specification. files: those of its ConfigMap. volume: of its claim."""
    (container,) = pod["containers"]
    user = pod["securityContext"]["runAsUser"]
    root, config = folder / "root", folder / "config"
    for each in (root, config, volume):
        each.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (config / name).write_text(text)
    for path in (volume, *volume.rglob("*")):
        os.chown(path, user, pod["securityContext"]["fsGroup"], follow_symlinks=False)
    # what the image has, and what the container is given
    environment = {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", "HOME": "/home/onward", "LANG": "C.UTF-8"}
    environment |= {"PYTHONPATH": f"{ROOT / '.package'}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {each["name"]: each["value"] for each in container["env"]}
    script = BOOT.format(
        root=root,
        home=volume,
        files=config,
        python=sys.base_prefix,
        user=user,
        environment=" ".join(shlex.quote(f"{name}={value}") for name, value in environment.items()),
        command=shlex.join(container["command"]),
    )
    (folder / "pod.sh").write_text(script)
    with (folder / "pod.log").open("ab") as log:
        return subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", "--mount", "sh", str(folder / "pod.sh")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def first_process(pod: subprocess.Popen[bytes]) -> psutil.Process:
    """The process that the container's signals go to."""
    found: psutil.Process = until(lambda: psutil.Process(pod.pid).children(), limit_s=20)[0]
    return found
