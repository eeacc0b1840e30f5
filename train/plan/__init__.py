"""Plans a run from its configuration: parameters, memory, pace, and changes that make it fit."""
