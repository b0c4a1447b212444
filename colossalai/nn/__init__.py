from colossalai.utils.pending import pending_names

from .init import *  # noqa: F403
from .layer import *  # noqa: F403
from .loss import *  # noqa: F403
from .lr_scheduler import *  # noqa: F403
from .optimizer import *  # noqa: F403

__getattr__ = pending_names(__name__)
