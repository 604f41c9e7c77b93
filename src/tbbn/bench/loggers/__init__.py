"""Loggers receive the numbers of a run while it trains: ``tbbn run --log tensorboard,wandb``.

- ``base.py``: the protocol, and the class that calls a run's loggers
- ``jsonl.py``: the default, one line of JSON per epoch and task
- ``tensorboard.py``, ``wandb.py``, ``mlflow.py``: each needs its package
"""

from tbbn.bench.loggers.base import DEFAULT, Logger, RunInfo, RunLog, make_loggers, parse_names
from tbbn.bench.loggers.jsonl import LOG, JsonLines, read_lines
from tbbn.bench.loggers.mlflow import MLflow
from tbbn.bench.loggers.tensorboard import TensorBoard
from tbbn.bench.loggers.wandb import WeightsAndBiases
from tbbn.registry import LOGGERS

__all__ = ["DEFAULT", "LOG", "Logger", "RunInfo", "RunLog", "make_loggers", "parse_names", "read_lines"]

LOGGERS.register("jsonl", JsonLines, "log.jsonl in the folder of the run, one line per epoch and task; always on")
LOGGERS.register("tensorboard", TensorBoard, "TensorBoard, in tensorboard/ in the folder of the run")
LOGGERS.register("wandb", WeightsAndBiases, "Weights & Biases; WANDB_MODE=offline keeps logs on this machine")
LOGGERS.register("mlflow", MLflow, "MLflow, to the server or folder of MLFLOW_TRACKING_URI")
