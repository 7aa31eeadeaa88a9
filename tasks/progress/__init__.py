"""How far a long step is: counted where it works, shown in Prefect's UI and on a terminal."""
