"""Makes rows of dialogues with slots, which people write in a YAML file."""
