"""What is raised in place of a score."""


class AnswerRefused(Exception):
    """Raised by a reward function for an answer in a form that it does not accept: it scores 0 and is counted, but not
    as a failure of the function. The text is feedback for the model."""


class ServiceAway(Exception):
    """What a reward function raises while the service that it asks is away: the same answer is asked about again, until
    there is a score, or reward.away_s is over and the run ends. The text says which service, and how it fails."""


class NeverScored(Exception):
    """What a reward function raises for an answer that has no score and would have none if it were tried again. The
    text says why."""


class RewardFailed(Exception):
    """What `Episode.score` raises if there is no score, after all tries: the episode ends, and is not trained."""
