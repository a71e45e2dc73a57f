"""Before a run: what it will take, in time, memory, disk, network and money; and whether it can be. No torch."""
