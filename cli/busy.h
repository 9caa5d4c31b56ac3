// Whether other work keeps the cores busy while a CPU is measured.
#pragma once

namespace eaves::cli {

/// Prints one line where others take a quarter of the cores' time or more. Looks for a tenth of a second.
void say_if_busy();

}  // namespace eaves::cli
