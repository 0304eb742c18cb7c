import sys

from import_config import main

sys.exit(main())
