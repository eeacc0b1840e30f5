"""Corrections of single answers, names and pronunciations, without training the model again."""
