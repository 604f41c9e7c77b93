"""Faster forms of the layer, chosen by :mod:`tbbn.accelerators.backend`. Optional: without this folder the reference is used."""
