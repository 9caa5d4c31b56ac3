// What Python needs of the library besides the operators: the abilities of this build on this machine, its self-test,
// the table of the losses' options, and the kernel that streams bytes.
#include "eaves/system.h"

#include <string>
#include <tuple>
#include <vector>

#include "cli/self_test_cases.h"
#include "cli/system_report.h"
#include "core/check.h"
#include "core/loss_options.h"
#include "eaves/version.h"
#include "runtime/runtime.h"
#include "torch_binding.h"

namespace eaves::binding {
namespace {

std::string version() { return EAVES_VERSION; }

std::string system_info() { return cli::system_json(eaves::system_info()); }

/// The lines of the self-test, and how many of its cases differ.
std::tuple<std::string, std::int64_t> self_test() {
  std::string report;
  const int differing = cli::self_test([&](const std::string& line) { report += line + "\n"; });
  return {report, differing};
}

std::int64_t bytes_of(const TensorView& view) {
  return view.element_count() * static_cast<std::int64_t>(size_of(view.dtype));
}

/// kLossOptions. Words: the flag and the expected value of each option. Numbers: its default, smallest and largest
/// value.
std::tuple<std::vector<std::string>, std::vector<double>> loss_options() {
  std::vector<std::string> words;
  std::vector<double> numbers;
  for (const LossOption& option : kLossOptions) {
    words.insert(words.end(), {option.flag, option.expected});
    numbers.insert(numbers.end(), {CrossEntropyOptions{}.*option.value, option.smallest, option.largest});
  }
  return {words, numbers};
}

void stream_bytes(Tensor source, Tensor destination, std::int64_t read_bytes, std::int64_t write_bytes) {
  const TensorView from = input(source, {"stream_bytes", "source"});
  const TensorView to = output(destination);
  check::is_on({"stream_bytes", "destination", to}, from.device, "source");
  for (const auto& [name, view, bytes] : {std::tuple("source", &from, read_bytes), {"destination", &to, write_bytes}}) {
    const check::Argument argument{"stream_bytes", name, *view};
    if (view->strides != TensorView::contiguous(view->data, view->dtype, view->shape).strides) {
      check::fail(argument, "is not contiguous (it has strides " + check::to_string(view->strides) +
                                "), expected a contiguous tensor");
    }
    if (bytes < 0 || bytes > bytes_of(*view)) {
      check::fail(argument, "has " + std::to_string(bytes_of(*view)) + " bytes, but " + std::to_string(bytes) +
                                " bytes are to be moved");
    }
    if (bytes > 0 && reinterpret_cast<std::uintptr_t>(view->data) % 64 != 0) {
      check::fail(argument, "is not aligned, expected an address divisible by 64");
    }
  }
  const Call call(from.device);
  runtime::stream_bytes(from.device, from.data, static_cast<std::size_t>(read_bytes), to.data,
                        static_cast<std::size_t>(write_bytes), call.context());
}

void implement(Library& library) { library.impl("stream_bytes", EAVES_BOX(stream_bytes)); }

}  // namespace
}  // namespace eaves::binding

STABLE_TORCH_LIBRARY_FRAGMENT(eaves, library) {
  library.def("version() -> str");
  library.def("system_info() -> str");
  library.def("self_test() -> (str report, int differing)");
  library.def("loss_options() -> (str[] words, float[] numbers)");
  library.def("stream_bytes(Tensor source, Tensor(a!) destination, int read_bytes, int write_bytes) -> ()");
}
// These functions take no tensor that would choose a device.
STABLE_TORCH_LIBRARY_IMPL(eaves, CompositeExplicitAutograd, library) {
  library.impl("version", EAVES_BOX(eaves::binding::version));
  library.impl("system_info", EAVES_BOX(eaves::binding::system_info));
  library.impl("self_test", EAVES_BOX(eaves::binding::self_test));
  library.impl("loss_options", EAVES_BOX(eaves::binding::loss_options));
}
EAVES_IMPLEMENT(eaves::binding::implement)
