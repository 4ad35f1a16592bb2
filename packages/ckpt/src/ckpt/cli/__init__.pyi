from ckpt.cli.commands import app as app
from ckpt.cli.foreign_text import (
    format_warning as format_warning,
    printable as printable,
    printable_warnings as printable_warnings,
)
