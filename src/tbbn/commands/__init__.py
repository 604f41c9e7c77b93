"""The commands of the command line, by what they do."""

from tbbn.commands import look, proof, train

MODULES = (train, look, proof)  # in the order of the help
