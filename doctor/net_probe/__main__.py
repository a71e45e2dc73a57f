"""make net-probe: bandwidth and latency between the nodes of a job, in a minute: of machines, or of pods (WHERE)."""

import logging
import sys

from doctor.net_probe import net, pods
from k8s.cluster.where import decide
from settings import SettingsError
from settings.finding import complain


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        place = decide()
        return pods.main(place) if place.cluster else net.here(place.config)
    except SettingsError as error:
        complain(error)
        return net.BAD_SETTING
    except KeyboardInterrupt:
        return net.TOLD_TO_STOP


if __name__ == "__main__":
    sys.exit(main())
