"""Training in 16 bits with masters of one's own; see :mod:`colossalai.amp.naive_amp`."""

from colossalai.utils.pending import pending_names

__getattr__ = pending_names(__name__)
