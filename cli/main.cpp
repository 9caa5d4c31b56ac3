// The program `eaves`: its command line, the one command that runs, and errors as exit codes and one sentence on
// stderr. No other file includes the parser, which takes longer to compile than the rest.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <exception>
#include <memory>
#include <numeric>
#include <string>
#include <system_error>
#include <type_traits>
#include <variant>
#include <vector>

#include "cli/commands.h"
#include "cli/run.h"
#include "cli/stop.h"
#include "eaves/error.h"
#include "eaves/version.h"

namespace eaves::cli {
namespace {

// A shell makes an empty text of an unset variable. That is not the same as leaving the option out.
const CLI::Validator kIsNotEmpty(
    [](std::string& text) { return text.empty() ? std::string("is empty, expected a value") : std::string(); }, "");

void add_threads(CLI::App& command, int& threads) {
  command.add_option("--threads", threads, "Number of CPU threads; 0 takes all")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
}

void add_info(CLI::App& program) {
  CLI::App* command =
      program.add_subcommand("info", "Describe this build and this machine, and name the missing parts.");
  command->footer("Example:\n  eaves info --json");
  const auto is_json = std::make_shared<bool>(false), is_self_test = std::make_shared<bool>(false);
  CLI::Option* json = command->add_flag("--json", *is_json, "Print JSON instead of text");
  command
      ->add_flag(
          "--self-test", *is_self_test,
          "Also compare every kernel of the CPU and of each kind of GPU with slow loops in float64, in a minute; "
          "exit code 1 if a result differs. The report is for an issue")
      ->excludes(json);
  command->callback([=] { *is_self_test ? print_self_test(self_test_cases()) : print_info(*is_json); });
}

void add_bench(CLI::App& program) {
  CLI::App* command =
      program.add_subcommand("bench", "Measure operators, and compare each time with the limit of the device.");
  command->footer(
      "Example:\n"
      "  eaves bench logsumexp --device cpu --dtype bf16 --max-bytes 8M --json result.json\n"
      "  eaves bench linear_cross_entropy --shape rows=2048,dim=768,v=50257\n\n"
      "A run that is stopped (Ctrl-C, SIGTERM, SIGHUP) writes the finished rows and ends with exit code 130.\n"
      "A second signal ends it at once.");
  const auto arguments = std::make_shared<BenchArguments>();
  command->add_option("operator", arguments->operators, "Operators to measure; default: all");
  command
      ->add_option("--device", arguments->device,
                   "Device: cpu, cuda or cuda:N; default: cuda if eaves can use a GPU, else cpu")
      ->check(kIsNotEmpty);
  command
      ->add_option(
          "--sweep", arguments->sweep,
          "Rows to measure. quick: sizes that suit the device; published: the rows of the tables that xopes published")
      ->check(CLI::IsMember({"quick", "published"}))
      ->capture_default_str();
  command
      ->add_option(
          "--shape", arguments->shape,
          "Measure one operator on this shape, within 30 seconds. The keys are rows,dim,v for linear_cross_entropy "
          "(rows=2048,dim=768,v=50257), rows,v for cross_entropy, rows,n for logsumexp, and "
          "batch,length,heads,dim for lrpe_cosine (grid=4x8x8 may replace length)")
      ->check(kIsNotEmpty);
  command->add_option("--dtype", arguments->dtype,
                      "Type of the inputs: bf16, fp16, fp32 or fp64; default: bf16, and for some rows also fp32");
  command->add_option("--json", arguments->json_path, "Also write the results to this file, as JSON")
      ->check(kIsNotEmpty);
  add_threads(*command, arguments->threads);
  command->add_option("--max-bytes", arguments->max_bytes,
                      "Skip rows that read and write more bytes than this, for example 64M or 2G");
  command
      ->add_option("--repetitions", arguments->repetitions,
                   "Number of repetitions of each row; slow rows get fewer, at least 5")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  command
      ->add_option("--warm-up-ms", arguments->warm_up_ms,
                   "Milliseconds of warm-up before each table, in which the clocks settle")
      ->check(CLI::Range(0.0, 60000.0))
      ->capture_default_str();
  command->callback([arguments] { run_bench(*arguments); });
}

void add_argument(CLI::App& command, const Argument& argument, Value& value) {
  value = argument.value;
  const auto add = [&]<typename T>(T& held) {
    if constexpr (std::is_same_v<T, bool>) {
      command.add_flag(argument.flag, held, argument.help);
    } else {
      CLI::Option* option = command.add_option(argument.flag, held, argument.help)->required(argument.is_required);
      if (!argument.words.empty()) {
        option->check(CLI::IsMember(argument.words));
      } else if constexpr (std::is_same_v<T, std::string>) {
        option->check(kIsNotEmpty);
      }
      if constexpr (std::is_same_v<T, std::vector<std::string>>) {
        option->delimiter(',');
      } else {
        option->capture_default_str();
      }
    }
  };
  std::visit(add, value);
}

void add_run(CLI::App& program) {
  CLI::App* run = program.add_subcommand("run", "Apply an operator to tensors of a safetensors file.");
  run->footer("Example:\n  eaves run logsumexp --input in.safetensors --tensor x --output out.safetensors");
  run->require_subcommand(1);
  for (const RunOperator& item : run_operators()) {
    CLI::App* command = run->add_subcommand(item.name, item.help);
    command->footer("Example:\n  eaves run " + item.name + " --input in.safetensors " + item.example +
                    " --output out.safetensors");
    const auto arguments = std::make_shared<RunArguments>();
    command->add_option("--input", arguments->input_path, "The safetensors file that holds the input tensors")
        ->required();
    command
        ->add_option("--output", arguments->output_path, "The safetensors file to write; an existing file is replaced")
        ->required();
    command->add_option("--device", arguments->device, "Device: cpu, cuda or cuda:N")->capture_default_str();
    add_threads(*command, arguments->threads);
    for (const Argument& argument : item.arguments) {
      add_argument(*command, argument, arguments->values[argument.flag]);
    }
    command->callback([&item, arguments] { run_operator(item, *arguments); });
  }
}

int fail(int code, const char* message) {
  std::fputs(fmt::format("eaves: {}\n", message).c_str(), stderr);  // fmt::print would throw if stderr is closed
  return code;
}

// The number of characters to insert, leave out or change to make one word of the other.
std::size_t distance(const std::string& from, const std::string& to) {
  std::vector<std::size_t> row(to.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (const char character : from) {
    std::size_t diagonal = row[0]++;
    for (std::size_t i = 0; i < to.size(); ++i) {
      const std::size_t changed = diagonal + (character != to[i]);
      diagonal = row[i + 1];
      row[i + 1] = std::min({changed, row[i] + 1, row[i + 1] + 1});
    }
  }
  return row.back();
}

// Names an option that the command lacks, and the option that was probably meant: it begins with the word, or differs
// from it in at most a third of the word's characters.
std::string describe_unknown(const CLI::App& command, const std::string& word) {
  const std::string unknown = word.substr(0, word.find('='));
  std::string nearest;
  std::size_t best = unknown.size() / 3 + 1;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      const std::string known = "--" + name;
      const std::size_t how_far = known.rfind(unknown, 0) == 0 ? 0 : distance(unknown, known);
      if (how_far < best) {
        best = how_far;
        nearest = known;
      }
    }
  }
  return "unknown option " + unknown + (nearest.empty() ? "" : fmt::format("; did you mean {}?", nearest));
}

// The parser's sentence and the help to read; for a misspelt option or command, the word and the existing ones.
std::string describe(const CLI::App& program, const CLI::ParseError& error) {
  std::string command = "eaves";
  const CLI::App* app = &program;
  while (!app->get_subcommands().empty()) {
    app = app->get_subcommands().front();
    command += " " + app->get_name();
  }
  std::string message = error.what();
  const auto unexpected = program.remaining(true);
  const bool is_required = dynamic_cast<const CLI::RequiredError*>(&error) != nullptr;
  if (unexpected.empty() || !(is_required || dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr)) {
    return fmt::format("{} (see {} --help)", message, command);
  }
  const auto is_option = [](const std::string& word) {
    return word.size() > 1 && word[0] == '-' && std::isdigit(static_cast<unsigned char>(word[1])) == 0;
  };
  const auto option = std::find_if(unexpected.begin(), unexpected.end(), is_option);
  std::vector<std::string> names;
  for (const CLI::App* each : app->get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(each->get_name());
  }
  if (!names.empty() && option != unexpected.begin()) {
    message =
        fmt::format("there is no command \"{}\", expected one of: {}", unexpected.front(), fmt::join(names, ", "));
  } else if (option != unexpected.end()) {
    message = describe_unknown(*app, *option);
  } else if (is_required) {
    message = fmt::format("\"{}\" was not expected: {}", unexpected.front(), message);
  }
  return fmt::format("{} (see {} --help)", message, command);
}

int run_program(int argc, char** argv) {
  CLI::App program{"Fused operators at the limit of the hardware. The program measures them and applies them to files.",
                   "eaves"};
  program.footer(
      "Example:\n  eaves info\n\n"
      "Exit codes:\n"
      "    0  success; also if the reader of a pipe stops early (| head)\n"
      "    1  the device or the system failed (out of memory, disk full), or a self-test found a wrong result\n"
      "    2  an argument or an input file is wrong\n"
      "    3  this build or this machine does not support the request\n"
      "  130  a signal stopped the program (Ctrl-C, SIGTERM, SIGHUP); no temporary file is left");
  program.set_version_flag("--version", EAVES_VERSION);
  program.require_subcommand(1);
  handle_stop_signals();
  try {
    add_info(program);
    add_bench(program);
    add_run(program);
    try {
      program.parse(argc, argv);
    } catch (const CLI::Success& request) {  // --help, --version
      program.exit(request);
    }
    flush_output();
    return 0;
  } catch (const CLI::ParseError& error) {
    return fail(kWrongArgumentOrFile, describe(program, error).c_str());
  } catch (const InvalidArgument& error) {
    return fail(kWrongArgumentOrFile, error.what());
  } catch (const Unsupported& error) {
    return fail(kUnsupported, error.what());
  } catch (const Stopped& stopped) {
    return fail(kStoppedExitCode, stopped.message.c_str());
  } catch (const std::system_error& error) {
    return error.code() == std::errc::broken_pipe ? 0 : fail(kDeviceOrSystemFailed, error.what());
  } catch (const std::exception& error) {
    return fail(kDeviceOrSystemFailed, error.what());
  }
}

}  // namespace
}  // namespace eaves::cli

int main(int argc, char** argv) { return eaves::cli::run_program(argc, argv); }
