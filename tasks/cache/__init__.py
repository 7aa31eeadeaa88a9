"""From one Delta version to decoded pixels that training reads with petastorm."""
