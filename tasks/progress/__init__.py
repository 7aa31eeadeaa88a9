"""Progress of long steps: counted where they run, shown in Prefect's UI and on a terminal."""
