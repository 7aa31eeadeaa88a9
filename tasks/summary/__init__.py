"""What a whole run of the DAG gave, for people and for programs."""
