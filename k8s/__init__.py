"""What the cluster runs, from the checked settings, and the commands that talk to it. Never imports torch."""
