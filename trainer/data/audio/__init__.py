"""Audio: decode files to waveforms of one sample rate, and compute log-mel spectrograms."""
