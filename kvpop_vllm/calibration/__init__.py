"""Measurements of a model that policies without a scorer need."""
