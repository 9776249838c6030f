"""The controller process: membership, the assignment, and the moves that change it."""
