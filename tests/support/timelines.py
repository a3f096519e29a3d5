"""What results and their timelines say."""


def bytes_moved(result, phase: str) -> int:
    """Bytes of all activities of a phase."""
    return sum(x.bytes for x in result.timeline.of(phase))
