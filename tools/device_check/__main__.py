import sys

from device_check import main

sys.exit(main())
