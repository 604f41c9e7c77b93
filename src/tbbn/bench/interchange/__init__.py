"""To and from other programs: settings of FACIL and PyCIL as recipes, trained networks as files that others read.

- ``imported.py``: what an import collects; ``facil.py`` and ``pycil.py``: what their settings mean here
- ``export.py``: a network as safetensors and ONNX, checked, in a folder that is never half written
- ``card.py``: the README that goes with it
"""
