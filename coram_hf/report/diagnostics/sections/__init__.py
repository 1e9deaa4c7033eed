"""The sections of the diagnostics, in the order of the output; a new one is a file and a line here."""

from coram_hf.report.diagnostics.section import Section
from coram_hf.report.diagnostics.sections import (
    audit,
    branches,
    conflict,
    contraction,
    decorrelation,
    dispersion,
    ownership,
    retention,
    threshold,
)

SECTIONS: dict[str, Section] = {
    section.name: section
    for section in (
        dispersion.SECTION,
        threshold.SECTION,
        contraction.SECTION,
        decorrelation.SECTION,
        branches.SECTION,
        audit.SECTION,
        ownership.SECTION,
        conflict.SECTION,
        retention.SECTION,
    )
}
