"""Actors that work on tensors together."""
