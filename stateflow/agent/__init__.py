"""An agent: starts, watches and stops the replicas of one machine, as the controller orders."""
