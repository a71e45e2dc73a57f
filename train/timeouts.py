"""How long the trainer waits before it gives up. Standard library only: plan, monitor and doctor read these too."""

# Seconds that training waits for a producer of data that makes no progress.
DATA_TIMEOUT_S = 900

# Seconds that the processes which write a checkpoint wait for each other.
CHECKPOINT_TIMEOUT_S = 300

# Seconds that a synchronization waits for a site that is running but late.
SITE_WAIT_S = 120

# Seconds that a site waits for the lighthouse and the other sites, and, when it rejoins, for
# their weights.
SYNC_TIMEOUT_S = 1800
