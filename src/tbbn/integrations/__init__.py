"""Task-balanced batch norm inside other packages: Avalanche, Lightning, Hugging Face. Each module needs its package alone.

Import the one you need: ``from tbbn.integrations.avalanche import BalancePlugin``.
"""
