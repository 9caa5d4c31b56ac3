// See busy.h.
#include "cli/busy.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <fstream>
#include <string>
#include <thread>

namespace eaves::cli {
namespace {

constexpr double kBusy = 0.25;  // half of one of two cores

// The share of all cores' time that others take: for a tenth of a second, in which this program sleeps. 0 where the
// system does not say.
double busy_share() {
  struct Ticks {
    std::int64_t all = 0, idle = 0;
  };
  const auto read = [] {
    std::ifstream file("/proc/stat");
    std::string cpu;
    file >> cpu;
    Ticks ticks;
    // user, nice, system, idle, iowait, irq, softirq, steal; what follows is in user and nice already.
    for (std::int64_t field = 0, count = 0; field < 8 && file >> count; ++field) {
      ticks.all += count;
      if (field == 3 || field == 4) ticks.idle += count;
    }
    return ticks;
  };
  const Ticks before = read();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const Ticks after = read();
  const auto all = static_cast<double>(after.all - before.all);
  return all > 0.0 ? 1.0 - static_cast<double>(after.idle - before.idle) / all : 0.0;
}

}  // namespace

void say_if_busy() {
  const double share = busy_share();
  if (share < kBusy) return;
  fmt::print(
      "# the machine is busy: others take {:.0f} % of its cores' time; expect longer times than on a quiet one\n",
      100.0 * share);
}

}  // namespace eaves::cli
