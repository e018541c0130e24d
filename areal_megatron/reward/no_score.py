"""What is raised in place of a score."""


class AnswerRefused(Exception):
    """What a reward function raises for an answer in a form that it does not accept: it scores 0, which is no failure
    of the function, and is counted. The text is feedback for the model."""


class ServiceAway(Exception):
    """What a reward function raises while the service that it asks is away: the same answer is asked about again, until
    there is a score or reward.away_s is over. The text says which service, and how it fails."""


class RewardFailed(Exception):
    """What `Episode.score` raises if there is no score, after all tries: the episode ends, and is not trained."""
