"""The bench: trains and compares methods and norms for class-incremental learning.

``api`` is the entry point from Python, ``cli`` from the command line. Both resolve a ``config``. The ``engine`` trains it with
``data``, ``models`` and ``methods``, ``runs`` stores the results on disk, and ``report`` makes tables and plots.
"""
