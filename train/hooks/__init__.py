"""Features of a training run, a file each. Their order is in assemble.py."""
