"""Task-balanced batch norm in other packages: Avalanche, Lightning, Hugging Face. Each module needs only its own package.

Import the one you need: ``from tbbn.integrations.avalanche import BalancePlugin``.
"""
