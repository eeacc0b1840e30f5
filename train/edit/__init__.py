"""`python -m train edit`: correct what a model answers, judge the correction, put it into the weights and take it out again."""
