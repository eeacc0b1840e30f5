"""`python -m train eval FOLDER DATA`: a model's answers to somebody's questions, and figures of them.

questions    the data, row by row, in any form that is known
answers      one answer per question, judged, in a file that a later start goes on with
timing       questions streamed one by one: first audio, real-time factor
forgetting   the text-only score of this model, and of the one before its speech training
measures     what the figures are, with bootstrap intervals over questions
report       tables and pictures of a run; `compare` sets two beside each other
"""
