"""Set-up of a fresh machine: packages, Horovod, jars, and the archive of classes."""
