"""Programs of other libraries, as they are: a run of its own, with the extra ``referees``.

``python -m tests.referees`` prints the table of docs/referees.md. Each program of ``programs/`` is a ``Referee``
(referee.py), and the same program without shards is what it is compared with.
"""

from .torchvision_schemas import declared

TORCHVISION = declared()
