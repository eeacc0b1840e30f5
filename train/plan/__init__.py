"""Planning a run from its configuration: parameters, memory, pace, and what to turn when it does not fit."""
