"""Files of object stores and web servers: local copies of them, and stores that runs write to."""
