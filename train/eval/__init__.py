"""Evaluates a model on the questions of a data set (`omni-train eval FOLDER DATA`).

questions    the data, row by row, in any known format
answers      one answer per question, scored, in a file that a later start continues
timing       questions streamed one by one: first audio, real-time factor
forgetting   the text-only score of this model, and of the one before its speech training
measures     definitions of the figures, with bootstrap intervals over questions
report       tables and pictures of a run; `compare` compares two
"""
