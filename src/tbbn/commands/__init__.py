"""The commands of the command line, by what they do."""

from tbbn.commands import data, look, measure, proof, train

MODULES = (train, look, proof, data, measure)  # in the order of the help
