"""Faster backends of the layer, chosen by :mod:`tbbn.accelerators.backend`. Without this folder the reference is used."""
