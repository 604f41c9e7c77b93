"""The commands of the command line, by what they do."""

from tbbn.bench.cli import data, inspect, speed, train, verify

MODULES = (train, inspect, verify, data, speed)  # in the order of the help
