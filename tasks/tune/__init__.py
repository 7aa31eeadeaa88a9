"""The search for hyper-parameters: trials of a training, proposed, pruned and compared."""
