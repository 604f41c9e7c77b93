"""Exchange with other programs: import settings of FACIL and PyCIL as recipes, export trained networks.

- ``imported.py``: collects the result of an import; ``facil.py`` and ``pycil.py``: map their settings to ours
- ``export.py``: writes a network as safetensors and ONNX, checked, into a folder that is never half written
- ``card.py``: the README of an export
"""
