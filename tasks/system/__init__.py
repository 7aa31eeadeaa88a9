"""Resources of the machine and the process: cores, disks, locks, signals, the home folder."""
