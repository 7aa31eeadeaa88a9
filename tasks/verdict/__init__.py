"""The verdict: what training a head will reach, from the features of a frozen backbone, before it is trained."""
