"""Corrects a model's answers, evaluates the corrections, merges them into the weights and reverts them (`train edit`)."""
