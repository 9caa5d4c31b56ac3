// The program as its users meet it: started as a process, judged by exit code, text and files. Each --help's example
// is run as it stands there.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "cli/atomic_file.h"
#include "cli/operators.h"
#include "cli/safetensors.h"
#include "cli/stop.h"
#include "runtime/runtime.h"

namespace eaves::cli {
namespace {

namespace fs = std::filesystem;

struct Outcome {
  int exit_code = -1;
  std::string out, err;
};

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// The program that was built with this test: it lies in the same folder.
std::string program_path() {
  if (const char* path = std::getenv("EAVES_PROGRAM")) return path;
  return (fs::read_symlink("/proc/self/exe").parent_path() / "eaves").string();
}

class Program : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(fs::exists(program_path())) << program_path() << " is missing; EAVES_PROGRAM can name another place";
    std::string pattern = (fs::temp_directory_path() / "eaves_test_XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    write_example_input();
  }

  void TearDown() override { fs::remove_all(folder_); }

  // `line` is a shell command in the test's folder, its first word `eaves`.
  Outcome run(const std::string& line) const {
    EXPECT_EQ(line.rfind("eaves", 0), 0u) << line;
    const std::string command = "cd '" + folder_.string() + "' && '" + program_path() + "'" + line.substr(5) +
                                " >stdout.txt 2>stderr.txt </dev/null";
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_text(folder_ / "stdout.txt"),
            read_text(folder_ / "stderr.txt")};
  }

  void expect_refusal(const std::string& line, int exit_code, const std::string& sentence) const {
    const Outcome outcome = run(line);
    EXPECT_EQ(outcome.exit_code, exit_code) << line << "\n" << outcome.err;
    EXPECT_NE(outcome.err.find(sentence), std::string::npos)
        << line << "\nexpected: " << sentence << "\nactual:   " << outcome.err;
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
    EXPECT_EQ(outcome.out, "") << line;
    EXPECT_FALSE(fs::exists(folder_ / "out.safetensors")) << line;
    EXPECT_EQ(temporary_files(), 0) << line;
  }

  // As run(), but does not wait. Signals are not ignored, as they may be where the test itself runs in the background.
  pid_t start(std::vector<const char*> words) const {
    const std::string program = program_path();
    words.insert(words.begin(), "eaves");
    words.push_back(nullptr);
    fs::remove(folder_ / "stdout.txt");
    const pid_t child = fork();
    if (child != 0) return child;
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) ::signal(signal, SIG_DFL);
    const auto open_for = [](const char* name, int descriptor) {
      return dup2(open(name, O_WRONLY | O_CREAT | O_TRUNC, 0600), descriptor) == descriptor;
    };
    if (chdir(folder_.c_str()) != 0 || !open_for("stdout.txt", 1) || !open_for("stderr.txt", 2)) _exit(126);
    execv(program.c_str(), const_cast<char* const*>(words.data()));
    _exit(127);
  }

  Outcome stop(pid_t child, int signal) const {
    EXPECT_EQ(kill(child, signal), 0);
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_text(folder_ / "stdout.txt"),
            read_text(folder_ / "stderr.txt")};
  }

  template <typename Condition>
  static void wait_until(const Condition& condition) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!condition() && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_TRUE(condition());
  }

  int temporary_files() const {
    int count = 0;
    for (const auto& entry : fs::directory_iterator(folder_)) count += entry.path().extension() == ".tmp";
    return count;
  }

  void write_file(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name, std::ios::binary) << text;
  }

  // x is float32 [3, 4] at an odd address; the others have the shape that each test needs.
  void write_example_input() const {
    std::string header = R"({"odd":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                         R"("x":{"dtype":"F32","shape":[3,4],"data_offsets":[1,49]},)"
                         R"("g":{"dtype":"F32","shape":[3],"data_offsets":[49,61]},)"
                         R"("flags":{"dtype":"BOOL","shape":[4],"data_offsets":[61,65]},)"
                         R"("wide":{"dtype":"F64","shape":[2],"data_offsets":[65,81]},)"
                         R"("logits":{"dtype":"F32","shape":[3,4],"data_offsets":[81,129]},)"
                         R"("targets":{"dtype":"I64","shape":[3],"data_offsets":[129,153]},)"
                         R"("q":{"dtype":"F32","shape":[1,3,2,2],"data_offsets":[153,201]},)"
                         R"("theta":{"dtype":"F32","shape":[2,1],"data_offsets":[201,209]},)"
                         R"("head":{"dtype":"F32","shape":[3,4],"data_offsets":[209,257]},)"
                         R"("small":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[257,259]}})";
    header.resize((header.size() + 7) / 8 * 8, ' ');
    std::string data(259, '\0');
    std::memcpy(&data[1], kX, sizeof(kX));
    std::memcpy(&data[49], kG, sizeof(kG));
    data[61] = 1;
    const double wide[2] = {0.25, -0.5};
    std::memcpy(&data[65], wide, 16);
    std::memcpy(&data[81], kX, sizeof(kX));
    std::memcpy(&data[129], kTargets, sizeof(kTargets));
    std::memcpy(&data[153], kX, sizeof(kX));
    std::memcpy(&data[201], kTheta, sizeof(kTheta));
    std::memcpy(&data[209], kHead, sizeof(kHead));
    std::string length(8, '\0');
    for (int i = 0; i < 8; ++i) length[static_cast<std::size_t>(i)] = static_cast<char>(header.size() >> (8 * i));
    write_file("in.safetensors", length + header + data);
  }

  struct Result {
    DType dtype;
    Dims shape;
    std::vector<double> values;
  };

  // The format aligns nothing.
  template <typename T>
  static double value_of(const std::byte* element) {
    T value;
    std::memcpy(&value, element, sizeof(T));
    return static_cast<double>(value);
  }

  // A float32, float64 or int64 tensor of out.safetensors.
  Result read_result(const std::string& name) const {
    const MappedFile file("test", (folder_ / "out.safetensors").string());
    const StoredTensors tensors = parse_safetensors(file.bytes(), "out.safetensors");
    const StoredTensor& tensor = tensors.at(name);
    Result result{*tensor.dtype, tensor.shape, {}};
    const std::size_t width = size_of(result.dtype);
    for (std::size_t i = 0; i < tensor.data.size(); i += width) {
      const std::byte* element = tensor.data.data() + i;
      result.values.push_back(result.dtype == DType::int64     ? value_of<std::int64_t>(element)
                              : result.dtype == DType::float64 ? value_of<double>(element)
                                                               : value_of<float>(element));
    }
    return result;
  }

  bool has_result(const std::string& name) const {
    const MappedFile file("test", (folder_ / "out.safetensors").string());
    return parse_safetensors(file.bytes(), "out.safetensors").contains(name);
  }

  static constexpr float kX[12] = {0.0f, 1.0f, -1.0f, 0.5f, 2.0f, 2.0f, 2.0f, 2.0f, -3.0f, 80.0f, 7.0f, 0.25f};
  static constexpr float kG[3] = {1.0f, -2.0f, 0.5f};
  static constexpr float kTheta[2] = {1.0f, 0.25f};
  static constexpr std::int64_t kTargets[3] = {1, -100, 2};
  static constexpr float kHead[12] = {0.5f, -1.0f, 0.25f, 0.0f, 0.125f, 0.0f, 1.0f, -0.5f, 0.0f, 0.25f, -0.5f, 1.0f};
  fs::path folder_;
};

double logsumexp(const float* values, int count) {
  double sum = 0.0;
  for (int i = 0; i < count; ++i) sum += std::exp(static_cast<double>(values[i]));
  return std::log(sum);
}

TEST_F(Program, ExampleOfEachHelpRuns) {
  std::vector<std::string> commands = {"eaves", "eaves info", "eaves bench", "eaves run"};
  for (const Operator& item : registered_operators()) commands.push_back("eaves run " + item.benchmark.name);
  for (const std::string& command : commands) {
    const Outcome help = run(command + " --help");
    EXPECT_EQ(help.exit_code, 0);
    const std::size_t example = help.out.find("Example:\n  ");
    ASSERT_NE(example, std::string::npos) << command << " --help shows no example:\n" << help.out;
    const std::size_t begin = example + std::strlen("Example:\n  ");
    const std::string line = help.out.substr(begin, help.out.find('\n', begin) - begin);
    EXPECT_EQ(line.rfind(command, 0), 0u) << line;
    const Outcome outcome = run(line);
    EXPECT_EQ(outcome.exit_code, 0) << line << "\n" << outcome.err;
    EXPECT_EQ(outcome.err, "") << line;
  }
}

TEST_F(Program, InfoNamesVersionAndCpuAndIsTheSameInJson) {
  const Outcome text = run("eaves info");
  const Outcome json_text = run("eaves info --json");
  EXPECT_EQ(json_text.exit_code, 0);
  const auto json = nlohmann::json::parse(json_text.out);
  EXPECT_NE(text.out.find(json["version"].get<std::string>()), std::string::npos) << text.out;
  EXPECT_NE(text.out.find(json["cpu"]["level"].get<std::string>()), std::string::npos) << text.out;
  EXPECT_NE(text.out.find(json["cpu"]["matrix_products"].get<std::string>()), std::string::npos) << text.out;
  EXPECT_GE(json["cpu"]["threads"].get<int>(), 1);
  EXPECT_EQ(json["gpus"].size(), static_cast<std::size_t>(runtime::gpu_count()));
  for (const auto& sentence : json["missing"]) {
    EXPECT_NE(text.out.find(sentence.get<std::string>()), std::string::npos) << text.out;
  }
}

TEST_F(Program, BenchPrintsTablesAndWritesTheResultFile) {
  const Outcome outcome =
      run("eaves bench logsumexp --device cpu --max-bytes 600K --repetitions 2 --warm-up-ms 0 --json result.json");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "") << "progress is for terminals";
  const std::string title = "logsumexp-speed-fwd-batch1-dim256-bf16:\n";
  ASSERT_NE(outcome.out.find(title), std::string::npos) << outcome.out;
  // Word by word: how far apart they stand depends on how long the times are.
  std::istringstream heads(outcome.out.substr(outcome.out.find(title) + title.size()));
  for (const std::string expected : {"n", "eaves", "limit", "ratio"}) {
    std::string head;
    heads >> head;
    EXPECT_EQ(head, expected) << outcome.out;
  }
  EXPECT_NE(outcome.out.find("left out: moves"), std::string::npos);
  const auto json = nlohmann::json::parse(read_text(folder_ / "result.json"));
  EXPECT_EQ(json["schema"], 1);
  ASSERT_GT(json["rows"].size(), 2u);
  EXPECT_EQ(json["rows"][0]["provider"], "eaves");
  EXPECT_GT(json["rows"][0]["ms"].get<double>(), 0.0);
  EXPECT_EQ(json["rows"][1]["provider"], "limit");
  EXPECT_EQ(json["rows"][1]["repetitions"], 2);
  EXPECT_EQ(temporary_files(), 0);
}

TEST_F(Program, BenchOfCrossEntropyHasThePublishedTitlesAndNamesItsOptions) {
  const Outcome outcome =
      run("eaves bench cross_entropy --device cpu --max-bytes 9M --repetitions 1 --warm-up-ms 0 --json result.json");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  for (const char* mode : {"fwd", "bwd"}) {
    const std::string title = std::string("cross_entropy-speed-") + mode + "-batch256-bf16-ls0.0-mean:\n";
    EXPECT_NE(outcome.out.find(title), std::string::npos) << outcome.out;
  }
  const auto json = nlohmann::json::parse(read_text(folder_ / "result.json"));
  const auto& first = json["rows"][0];
  EXPECT_EQ(first["shape"], (nlohmann::json{{"batch", 256}, {"v", 1024}}));
  EXPECT_EQ(first["options"], (nlohmann::json{{"reduction", "mean"}}));
  EXPECT_GT(first["ms"].get<double>(), 0.0);
  std::set<std::string> modes, options;
  for (const auto& row : json["rows"]) {
    modes.insert(row["mode"]);
    for (const auto& [key, value] : row["options"].items()) options.insert(key);
  }
  EXPECT_EQ(modes, (std::set<std::string>{"bwd", "fwd", "fwd+bwd"}));
  EXPECT_EQ(options,
            (std::set<std::string>{"argmax", "class_axis", "entropy", "ignored_rows", "in_place", "label_smoothing",
                                   "reduction", "soft_targets", "softcap", "weight", "z_loss"}));
}

TEST_F(Program, BenchOfLrpeCosineHasThePublishedTitlesAndNamesItsOptions) {
  const Outcome outcome =
      run("eaves bench lrpe_cosine --device cpu --max-bytes 5M --repetitions 1 --warm-up-ms 0 --json result.json");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  for (const char* kind : {"speed", "memory"}) {
    for (const char* mode : {"fwd", "bwd"}) {
      const std::string begin = std::string("lrpe_cosine-") + kind + "-" + mode + "-batch1-head12-dim128-";
      for (const char* end : {"act_none-bf16", "act_silu-bf16", "act_softmax-dim_-1-bf16", "act_softmax-dim_-2-bf16"}) {
        EXPECT_NE(outcome.out.find("\n" + begin + end + ":\n"), std::string::npos) << begin + end;
      }
      for (const char* end : {"1d-l0", "1d-l10", "2d-l0", "2d-l10", "3d-l0", "3d-l10"}) {
        EXPECT_NE(outcome.out.find("\nmd_" + begin + "bf16-" + end + ":\n"), std::string::npos) << begin + end;
      }
    }
  }
  EXPECT_EQ(outcome.out.find("grid="), std::string::npos) << "the edge of the grid stands in the first column";
  EXPECT_NE(outcome.out.find(" and `md_lrpe_cosine` means lrpe_cosine over a grid.\n"), std::string::npos);
  const auto json = nlohmann::json::parse(read_text(folder_ / "result.json"));
  const auto& first = json["rows"][0];
  EXPECT_EQ(first["op"], "lrpe_cosine");
  EXPECT_EQ(first["shape"], (nlohmann::json{{"batch", 1}, {"head", 12}, {"dim", 128}, {"n", 512}}));
  EXPECT_EQ(first["options"], nlohmann::json::object());
  EXPECT_GT(first["ms"].get<double>(), 0.0);
  std::set<std::string> options, cases;
  bool has_cube = false;
  for (const auto& row : json["rows"]) {
    EXPECT_EQ(row["op"], "lrpe_cosine");
    for (const auto& [key, value] : row["options"].items()) options.insert(key);
    std::string name;
    for (const char* key : {"mode", "dtype", "shape", "options", "provider"}) name += row[key].dump() + " ";
    EXPECT_TRUE(cases.insert(name).second) << name << "is measured twice";
    has_cube = has_cube || row["options"] == nlohmann::json{{"grid", {16, 16, 16}}, {"extra_tokens", 10}};
  }
  EXPECT_TRUE(has_cube);
  EXPECT_EQ(options,
            (std::set<std::string>{"activation", "activation_dim", "extra_tokens", "grad_theta", "grid", "layout"}));
}

TEST_F(Program, BenchOfLinearCrossEntropyHasThePublishedTitlesAndNamesItsOptions) {
  const Outcome outcome =
      run("eaves bench linear_cross_entropy --device cpu --max-bytes 7M --repetitions 1 --warm-up-ms 0 --json "
          "result.json");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const std::string begin = "fwd+bwd-batch512-dim1024-bf16";
  for (const std::string kind : {"speed-", "memory-"}) {
    for (const char* end : {"", "-algorithm_memory", "-data_dense", "-algorithm_memory-data_dense"}) {
      EXPECT_NE(outcome.out.find("lce-" + kind + begin + end + ":\n"), std::string::npos) << kind << end;
    }
    EXPECT_NE(outcome.out.find("lce-" + kind + "fwd-batch512-dim1024-bf16:\n"), std::string::npos) << outcome.out;
  }
  const auto json = nlohmann::json::parse(read_text(folder_ / "result.json"));
  const auto& first = json["rows"][0];
  EXPECT_EQ(first["op"], "linear_cross_entropy");
  EXPECT_EQ(first["shape"], (nlohmann::json{{"batch", 512}, {"dim", 1024}, {"v", 1024}}));
  EXPECT_EQ(first["options"], (nlohmann::json{{"reduction", "mean"}, {"algorithm", "speed"}, {"data", "seed"}}));
  EXPECT_GT(first["ms"].get<double>(), 0.0);
  EXPECT_GT(first["tflops"].get<double>(), 0.0);
  std::set<std::string> modes, options, cases;
  for (const auto& row : json["rows"]) {
    modes.insert(row["mode"]);
    for (const auto& [key, value] : row["options"].items()) options.insert(key);
    std::string name;
    for (const char* key : {"mode", "dtype", "shape", "options", "provider"}) name += row[key].dump() + " ";
    EXPECT_TRUE(cases.insert(name).second) << name << "is measured twice";
  }
  EXPECT_EQ(modes, (std::set<std::string>{"fwd", "fwd+bwd"}));
  EXPECT_EQ(options, (std::set<std::string>{"algorithm", "data", "grad_weight", "grad_x", "ignored_rows", "logits",
                                            "reduction", "skip_ignored"}));
}

TEST_F(Program, BenchWithANamedDtypeMeasuresNoOther) {
  const Outcome outcome = run("eaves bench --device cpu --dtype fp32 --max-bytes 2M --repetitions 1 --warm-up-ms 0");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("-fp32:"), std::string::npos) << outcome.out;
  EXPECT_EQ(outcome.out.find("-bf16:"), std::string::npos) << outcome.out;
}

TEST_F(Program, BenchThatLeavesOutEveryRowSaysSo) {
  const Outcome outcome = run("eaves bench --device cpu --max-bytes 1 --warm-up-ms 0");
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_NE(outcome.err.find("--max-bytes: 1 leaves out every row, expected more"), std::string::npos) << outcome.err;
}

TEST_F(Program, WrongArgumentsAreNamed) {
  expect_refusal("eaves run logsumexp --input a --tensor x --dims '' --output b", 2,
                 "--dims: is empty, expected a value");
  expect_refusal("eaves", 2, "A subcommand is required");
  expect_refusal("eaves paint", 2, "\"paint\" was not expected: A subcommand is required (eaves --help");
  expect_refusal("eaves run paint", 2, "\"paint\" was not expected: A subcommand is required (eaves run --help");
  expect_refusal("eaves info --loud", 2, "--loud");
  expect_refusal("eaves bench logsumexq", 2, "bench: there is no operator \"logsumexq\", expected one of: logsumexp");
  expect_refusal("eaves bench --device tpu", 2, "--device: is \"tpu\", expected cpu, cuda");
  expect_refusal("eaves bench --sweep slow", 2, "--sweep: slow not in {quick,seed}");
  expect_refusal("eaves bench --dtype fp31", 2, "--dtype: is \"fp31\", expected the name of a dtype");
  expect_refusal("eaves bench --dtype int32", 2, "--dtype: is int32, expected a floating-point type");
  expect_refusal("eaves bench --max-bytes 3X", 2, "--max-bytes: is \"3X\", expected a number of bytes");
  expect_refusal("eaves bench --repetitions 0", 2, "--repetitions: Value 0 not in range");
  expect_refusal("eaves bench --threads -1", 2, "--threads: Value -1 not in range");
  expect_refusal("eaves bench --device cpu --json nowhere/result.json", 2,
                 "--json: nowhere/result.json cannot be written: No such file or directory");
  expect_refusal("eaves bench --device cpu --json /dev/null", 2, "--json: /dev/null exists and is not a regular file");
}

TEST_F(Program, GpuThatIsNotThereIsUnsupported) {
  if (runtime::gpu_count() == 0) {
    expect_refusal("eaves bench --device cuda", 3, "--device cuda: there is no usable GPU: ");
  } else {
    expect_refusal("eaves bench --device cuda:99", 3, "--device cuda:99: this machine has ");
  }
}

TEST_F(Program, RunWritesOutLseAndGradient) {
  const Outcome outcome =
      run("eaves run logsumexp --input in.safetensors --tensor x --dims -1 --grad g --output out.safetensors");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const Result out = read_result("out");
  const Result lse = read_result("lse");
  const Result grad = read_result("grad_x");
  EXPECT_EQ(out.shape, (Dims{3}));
  EXPECT_EQ(lse.dtype, DType::float32);
  EXPECT_EQ(grad.shape, (Dims{3, 4}));
  for (int row = 0; row < 3; ++row) {
    const auto r = static_cast<std::size_t>(row);
    const double expected = logsumexp(kX + 4 * row, 4);
    EXPECT_NEAR(out.values[r], expected, 1e-5 * std::abs(expected));
    EXPECT_NEAR(lse.values[r], expected, 1e-5 * std::abs(expected));
    for (int i = 0; i < 4; ++i) {
      const auto index = static_cast<std::size_t>(4 * row + i);
      EXPECT_NEAR(grad.values[index], kG[row] * std::exp(kX[index] - expected), 1e-4);
    }
  }
}

TEST_F(Program, RunTakesOtherAxesDtypesAndKeepdim) {
  ASSERT_EQ(run("eaves run logsumexp --input in.safetensors --tensor x --dims 0,1 --keepdim --output out.safetensors")
                .exit_code,
            0);
  EXPECT_EQ(read_result("out").shape, (Dims{1, 1}));
  EXPECT_NEAR(read_result("out").values[0], logsumexp(kX, 12), 1e-4);

  ASSERT_EQ(run("eaves run logsumexp --input in.safetensors --tensor flags --output out.safetensors").exit_code, 0);
  EXPECT_EQ(read_result("out").dtype, DType::float32);
  EXPECT_NEAR(read_result("out").values[0], std::log(std::exp(1.0) + 3.0), 1e-6);

  ASSERT_EQ(run("eaves run logsumexp --input in.safetensors --tensor wide --dtype float32 --output out.safetensors")
                .exit_code,
            0);
  EXPECT_EQ(read_result("out").dtype, DType::float32);
  EXPECT_EQ(read_result("lse").dtype, DType::float64);
  EXPECT_NEAR(read_result("lse").values[0], std::log(std::exp(0.25) + std::exp(-0.5)), 1e-12);
}

// Cross entropy of rows of 4 classes as the header writes it, in float64. Options as the tests below use them.
struct ExpectedRow {
  double loss, z_loss, lse, weight;
  double entropy = 0.0;
  double gradient[4] = {};
};

ExpectedRow cross_entropy_row(const float* logits, std::int64_t target, const float* weights, double smoothing,
                              double softcap, double scale, double z_weight) {
  double z[4], slope[4];
  double sum = 0.0;
  for (int v = 0; v < 4; ++v) {
    const double scaled = scale * logits[v];
    const double tanh = softcap > 0.0 ? std::tanh(scaled / softcap) : 0.0;
    z[v] = softcap > 0.0 ? softcap * tanh : scaled;
    slope[v] = scale * (1.0 - tanh * tanh);
    sum += std::exp(z[v]);
  }
  const double lse = std::log(sum);
  const double w = weights[target];
  double smooth = 0.0, mass = (1.0 - smoothing) * w;
  for (int v = 0; v < 4; ++v) {
    smooth += weights[v] * (lse - z[v]) / 4.0;
    mass += smoothing * weights[v] / 4.0;
  }
  const double z_loss = z_weight * lse * lse;
  ExpectedRow row{(1.0 - smoothing) * w * (lse - z[target]) + smoothing * smooth + z_loss, z_loss, lse, w};
  for (int v = 0; v < 4; ++v) {
    const double p = std::exp(z[v] - lse);
    row.entropy -= p * std::log(p);
    const double of_target = v == target ? (1.0 - smoothing) * w : 0.0;
    row.gradient[v] = (p * (mass + 2.0 * z_weight * lse) - of_target - smoothing * weights[v] / 4.0) * slope[v];
  }
  return row;
}

constexpr float kNoWeights[4] = {1.0f, 1.0f, 1.0f, 1.0f};

TEST_F(Program, RunCrossEntropyWritesLossLseAndGradient) {
  const std::string line = "eaves run cross_entropy --input in.safetensors --tensor logits --target targets";
  for (const char* how : {" --backward", " --in-place"}) {
    const Outcome outcome = run(line + how + " --output out.safetensors");
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    const Result grad = read_result("grad_logits");
    EXPECT_EQ(read_result("loss").shape, Dims{});
    EXPECT_EQ(read_result("lse").shape, (Dims{3}));
    EXPECT_EQ(grad.shape, (Dims{3, 4}));
    double mean = 0.0;
    for (const int row : {0, 2}) {  // row 1 is ignored
      const auto expected = cross_entropy_row(kX + 4 * row, kTargets[row], kNoWeights, 0.0, 0.0, 1.0, 0.0);
      mean += expected.loss / 2.0;
      EXPECT_NEAR(read_result("lse").values[static_cast<std::size_t>(row)], expected.lse, 1e-5 * expected.lse);
      for (int v = 0; v < 4; ++v) {
        EXPECT_NEAR(grad.values[static_cast<std::size_t>(4 * row + v)], expected.gradient[v] / 2.0, 1e-6)
            << how << " row " << row << " class " << v;
      }
    }
    EXPECT_NEAR(read_result("loss").values[0], mean, 1e-5 * mean) << how;
    for (std::size_t v = 4; v < 8; ++v) EXPECT_EQ(grad.values[v], 0.0) << how;
  }
  ASSERT_EQ(run(line + " --output out.safetensors").exit_code, 0);
  EXPECT_FALSE(has_result("grad_logits")) << "nobody asked for it";
}

// A file as a user's program writes it: logits with the classes first, weights, an upstream gradient, a divisor.
class ProgramWithABatch : public Program {
 protected:
  void SetUp() override {
    Program::SetUp();
    if (HasFatalFailure()) return;
    AtomicFile file("test", (folder_ / "batch.safetensors").string());
    write_safetensors(file, {{"logits", TensorView::contiguous(kLogits, DType::float32, {4, 3})},
                             {"targets", TensorView::contiguous(kClasses, DType::int32, {3})},
                             {"soft", TensorView::contiguous(kSoft, DType::float32, {4, 3})},
                             {"weight", TensorView::contiguous(kWeights, DType::float32, {4})},
                             {"upstream", TensorView::contiguous(kUpstream, DType::float32, {3})},
                             {"tokens", TensorView::contiguous(&kTokens, DType::float32, {})}});
    file.commit();
  }

  static void logits_of_row(int row, float* logits) {
    for (int v = 0; v < 4; ++v) logits[v] = kLogits[3 * v + row];
  }

  // The classes are the rows of these.
  static constexpr float kLogits[12] = {0.5f, -1.0f, 3.0f, 2.0f, 0.25f, -2.0f, -0.75f, 1.5f, 0.0f, 1.0f, -3.0f, 4.0f};
  static constexpr float kSoft[12] = {0.1f, 0.0f, 0.25f, 0.2f, 1.0f, 0.25f, 0.3f, 0.0f, 0.25f, 0.4f, 0.0f, 0.25f};
  static constexpr std::int32_t kClasses[3] = {3, 7, 0};  // 7 is what the test ignores
  static constexpr float kWeights[4] = {0.5f, 2.0f, 1.5f, 0.25f};
  static constexpr float kUpstream[3] = {1.0f, 5.0f, -2.0f};
  static constexpr float kTokens = 16.0f;
};

TEST_F(ProgramWithABatch, RunCrossEntropyTakesEveryOption) {
  const std::string line =
      "eaves run cross_entropy --input batch.safetensors --tensor logits --target targets --class-axis 0 --weight "
      "weight --ignore-index 7 --label-smoothing 0.25 --softcap 2 --scale 1.5 --z-loss 0.125 --entropy --argmax "
      "--reduction none --grad upstream --output out.safetensors";
  const int largest[3] = {1, 2, 3};
  for (const bool is_in_place : {false, true}) {
    const Outcome outcome = run(line + (is_in_place ? " --in-place" : ""));
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    for (const int row : {0, 2}) {
      const auto r = static_cast<std::size_t>(row);
      float logits[4];
      logits_of_row(row, logits);
      const auto expected = cross_entropy_row(logits, kClasses[row], kWeights, 0.25, 2.0, 1.5, 0.125);
      EXPECT_NEAR(read_result("loss").values[r], expected.loss, 1e-5);
      EXPECT_NEAR(read_result("z_loss").values[r], expected.z_loss, 1e-5);
      EXPECT_NEAR(read_result("lse").values[r], expected.lse, 1e-5);
      EXPECT_NEAR(read_result("entropy").values[r], expected.entropy, 1e-5);
      EXPECT_EQ(read_result("argmax").values[r], largest[row]);
      for (int v = 0; v < 4; ++v) {
        EXPECT_NEAR(read_result("grad_logits").values[static_cast<std::size_t>(3 * v + row)],
                    kUpstream[row] * expected.gradient[v], 1e-5)
            << "row " << row << " class " << v << (is_in_place ? " in place" : "");
      }
    }
    EXPECT_EQ(read_result("loss").values[1], 0.0) << "ignored";
    EXPECT_EQ(read_result("grad_logits").values[1], 0.0) << "ignored";
    EXPECT_EQ(read_result("grad_logits").shape, (Dims{4, 3}));
  }
}

TEST_F(ProgramWithABatch, RunCrossEntropyReducesAndDividesAsAsked) {
  const std::string line =
      "eaves run cross_entropy --input batch.safetensors --tensor logits --target targets --class-axis 0 --weight "
      "weight --ignore-index 7 --output out.safetensors ";
  double sum = 0.0, weights = 0.0;
  for (const int row : {0, 2}) {
    float logits[4];
    logits_of_row(row, logits);
    const auto expected = cross_entropy_row(logits, kClasses[row], kWeights, 0.0, 0.0, 1.0, 0.0);
    sum += expected.loss;
    weights += expected.weight;
  }
  const auto expect_loss = [&](const std::string& options, double loss) {
    const Outcome outcome = run(line + options);
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_NEAR(read_result("loss").values[0], loss, 1e-5) << options;
  };
  expect_loss("--reduction sum", sum);
  expect_loss("--reduction mean", sum / weights);
  expect_loss("--normalizer tokens", sum / kTokens);
}

TEST_F(ProgramWithABatch, RunCrossEntropyTakesADistributionForEachRow) {
  const Outcome outcome =
      run("eaves run cross_entropy --input batch.safetensors --tensor logits --target soft --class-axis 0 --backward "
          "--output out.safetensors");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  double mean = 0.0;
  for (int row = 0; row < 3; ++row) {
    float logits[4];
    logits_of_row(row, logits);
    const double lse = logsumexp(logits, 4);
    for (int v = 0; v < 4; ++v) {
      const auto index = static_cast<std::size_t>(3 * v + row);
      mean += kSoft[index] * (lse - logits[v]) / 3.0;
      EXPECT_NEAR(read_result("grad_logits").values[index], (std::exp(logits[v] - lse) - kSoft[index]) / 3.0, 1e-6);
    }
  }
  EXPECT_NEAR(read_result("loss").values[0], mean, 1e-5);
}

TEST_F(ProgramWithABatch, WrongArgumentsOfCrossEntropyAreNamed) {
  const std::string start = "eaves run cross_entropy --output out.safetensors --input batch.safetensors --tensor ";
  const std::string logits = start + "logits --class-axis 0 --ignore-index 7 ";
  const std::string line = logits + "--target targets ";
  expect_refusal("eaves run cross_entropy", 2, "--input is required");
  expect_refusal(logits, 2, "--target is required");
  expect_refusal(logits + "--target nothing", 2,
                 "--target: batch.safetensors has no tensor \"nothing\", expected one of");
  expect_refusal(start + "nothing --target targets", 2, "--tensor: batch.safetensors has no tensor \"nothing\"");
  expect_refusal(line + "--weight nothing", 2, "--weight: batch.safetensors has no tensor \"nothing\"");
  expect_refusal(line + "--weight ''", 2, "--weight: is empty, expected a value");
  expect_refusal(line + "--normalizer nothing", 2, "--normalizer: batch.safetensors has no tensor \"nothing\"");
  expect_refusal(line + "--grad nothing", 2, "--grad: batch.safetensors has no tensor \"nothing\"");
  expect_refusal(line + "--grad upstream --backward", 2, "--backward excludes --grad");
  expect_refusal(line + "--reduction max", 2, "--reduction: max not in {none,sum,mean}");
  expect_refusal(line + "--label-smoothing lots", 2, "--label-smoothing");
  // The core's sentences, before anything is written.
  expect_refusal(start + "logits --target targets --class-axis 2", 2,
                 "cross_entropy: class_axis is 2, expected -2 to 1 (logits has 2 axes)");
  expect_refusal(start + "logits --target targets", 2,
                 "targets has shape [3], expected [4] (one per row of logits [4, 3])");
  expect_refusal(start + "targets --target targets", 2, "logits has dtype int32, expected float32 or float64");
  expect_refusal(start + "tokens --target targets", 2, "logits has no axes, expected at least one");
  expect_refusal(line + "--weight upstream", 2, "weight has shape [3], expected [4] (one per class of logits)");
  expect_refusal(line + "--normalizer weight", 2, "normalizer has ");
  expect_refusal(line + "--normalizer tokens --reduction sum", 2, "normalizer is given, but only the mean divides");
  expect_refusal(line + "--grad upstream", 2, "grad_loss has ");
  expect_refusal(line + "--grad upstream --in-place", 2, "grad_loss has ");
  expect_refusal(line + "--label-smoothing 1.5", 2, "label_smoothing is 1.5, expected 0 to 1");
  expect_refusal(line + "--softcap -1", 2, "softcap is -1, expected a positive number that float32 has, or 0 for none");
  expect_refusal(line + "--scale 0", 2, "scale is 0, expected a positive number");
  expect_refusal(line + "--z-loss -0.5", 2, "z_loss_weight is -0.5, expected a number that is not negative");
  expect_refusal(start + "logits --class-axis 0 --target targets", 2,
                 "targets[1] is 7, expected 0 to 3, or ignore_index -100");
}

TEST_F(Program, RunLinearCrossEntropyWritesLossLseAndGradients) {
  const std::string line =
      "eaves run linear_cross_entropy --input in.safetensors --tensor x --linear-weight head --target targets --output "
      "out.safetensors";
  for (const char* how : {" --backward", " --backward --algorithm speed", " --backward --algorithm memory"}) {
    const Outcome outcome = run(line + how);
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    double mean = 0.0, grad_head[12] = {};
    for (const int row : {0, 2}) {  // row 1 is ignored
      const float* x = kX + 4 * row;
      float z[3] = {};
      for (int v = 0; v < 3; ++v) {
        for (int d = 0; d < 4; ++d) z[v] += x[d] * kHead[4 * v + d];
      }
      const double lse = logsumexp(z, 3);
      mean += (lse - z[kTargets[row]]) / 2.0;
      EXPECT_NEAR(read_result("lse").values[static_cast<std::size_t>(row)], lse, 1e-5) << how;
      double grad_x[4] = {};
      for (int v = 0; v < 3; ++v) {
        const double dz = (std::exp(z[v] - lse) - (v == kTargets[row] ? 1.0 : 0.0)) / 2.0;
        for (int d = 0; d < 4; ++d) {
          grad_x[d] += dz * kHead[4 * v + d];
          grad_head[4 * v + d] += dz * x[d];
        }
      }
      for (int d = 0; d < 4; ++d) {
        EXPECT_NEAR(read_result("grad_x").values[static_cast<std::size_t>(4 * row + d)], grad_x[d], 1e-5) << how;
      }
    }
    EXPECT_NEAR(read_result("loss").values[0], mean, 1e-5 * mean) << how;
    for (std::size_t i = 4; i < 8; ++i) EXPECT_EQ(read_result("grad_x").values[i], 0.0) << how << ", ignored";
    for (std::size_t i = 0; i < 12; ++i) {
      EXPECT_NEAR(read_result("grad_weight").values[i], grad_head[i], 1e-4) << how << " element " << i;
    }
    EXPECT_EQ(read_result("grad_weight").shape, (Dims{3, 4}));
    EXPECT_FALSE(has_result("grad_bias")) << "there is none";
  }
  ASSERT_EQ(run(line).exit_code, 0);
  for (const char* name : {"grad_x", "grad_weight"}) EXPECT_FALSE(has_result(name)) << "nobody asked for it";
}

// A file as a user's program writes it: rows that are the logits of ProgramWithABatch and a head that leaves them so,
// but for a bias: what the loss should be is known from there.
class ProgramWithAHead : public ProgramWithABatch {
 protected:
  void SetUp() override {
    ProgramWithABatch::SetUp();
    if (HasFatalFailure()) return;
    for (int row = 0; row < 3; ++row) {
      logits_of_row(row, &x_[4 * row]);
      for (int v = 0; v < 4; ++v) {
        x_[4 * row + v] -= kBias[v];
        soft_[4 * row + v] = kSoft[3 * v + row];
      }
    }
    AtomicFile file("test", (folder_ / "head.safetensors").string());
    write_safetensors(file, {{"x", TensorView::contiguous(x_, DType::float32, {3, 4})},
                             {"head", TensorView::contiguous(kIdentity, DType::float32, {4, 4})},
                             {"bias", TensorView::contiguous(kBias, DType::float32, {4})},
                             {"targets", TensorView::contiguous(kClasses, DType::int32, {3})},
                             {"soft", TensorView::contiguous(soft_, DType::float32, {3, 4})},
                             {"class_weight", TensorView::contiguous(kWeights, DType::float32, {4})},
                             {"upstream", TensorView::contiguous(kUpstream, DType::float32, {3})},
                             {"tokens", TensorView::contiguous(&kTokens, DType::float32, {})}});
    file.commit();
  }

  static constexpr float kIdentity[16] = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1};
  static constexpr float kBias[4] = {0.5f, -0.25f, 1.0f, 0.125f};
  float x_[12], soft_[12];
};

constexpr const char* kHeadLine =
    "eaves run linear_cross_entropy --output out.safetensors --input head.safetensors --tensor x --linear-weight head ";

TEST_F(ProgramWithAHead, RunLinearCrossEntropyTakesEveryOption) {
  const std::string line =
      kHeadLine + std::string(
                      "--linear-bias bias --target targets --weight class_weight --ignore-index 7 --label-smoothing "
                      "0.25 --softcap 2 --scale 1.5 --z-loss 0.125 --entropy --argmax --reduction none --skip-ignored "
                      "--workspace-limit 1M --grad upstream --algorithm ");
  const int largest[3] = {1, 2, 3};
  for (const char* algorithm : {"auto", "speed", "memory"}) {
    const Outcome outcome = run(line + algorithm);
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    double grad_bias[4] = {}, grad_head[16] = {};
    for (const int row : {0, 2}) {
      const auto r = static_cast<std::size_t>(row);
      float logits[4];
      logits_of_row(row, logits);
      const auto expected = cross_entropy_row(logits, kClasses[row], kWeights, 0.25, 2.0, 1.5, 0.125);
      EXPECT_NEAR(read_result("loss").values[r], expected.loss, 1e-5) << algorithm;
      EXPECT_NEAR(read_result("z_loss").values[r], expected.z_loss, 1e-5) << algorithm;
      EXPECT_NEAR(read_result("lse").values[r], expected.lse, 1e-5) << algorithm;
      EXPECT_NEAR(read_result("entropy").values[r], expected.entropy, 1e-5) << algorithm;
      EXPECT_EQ(read_result("argmax").values[r], largest[row]) << algorithm;
      for (int v = 0; v < 4; ++v) {
        const double dz = kUpstream[row] * expected.gradient[v];
        // The head is the identity: the gradient of x is that of the logits.
        EXPECT_NEAR(read_result("grad_x").values[4 * r + static_cast<std::size_t>(v)], dz, 1e-5) << algorithm;
        grad_bias[v] += dz;
        for (int d = 0; d < 4; ++d) grad_head[4 * v + d] += dz * x_[4 * row + d];
      }
    }
    for (std::size_t v = 0; v < 4; ++v) {
      EXPECT_NEAR(read_result("grad_bias").values[v], grad_bias[v], 1e-5) << algorithm;
    }
    for (std::size_t i = 0; i < 16; ++i) {
      EXPECT_NEAR(read_result("grad_weight").values[i], grad_head[i], 1e-5) << algorithm << " element " << i;
    }
    EXPECT_EQ(read_result("loss").values[1], 0.0) << "ignored";
  }
}

TEST_F(ProgramWithAHead, RunLinearCrossEntropyReducesAndDividesAsAsked) {
  const std::string line = kHeadLine + std::string("--linear-bias bias --target targets --ignore-index 7 ");
  double sum = 0.0;
  for (const int row : {0, 2}) {
    float logits[4];
    logits_of_row(row, logits);
    sum += cross_entropy_row(logits, kClasses[row], kNoWeights, 0.0, 0.0, 1.0, 0.0).loss;
  }
  const auto expect_loss = [&](const std::string& options, double loss) {
    const Outcome outcome = run(line + options);
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_NEAR(read_result("loss").values[0], loss, 1e-5) << options;
  };
  expect_loss("--reduction sum", sum);
  expect_loss("--reduction mean", sum / 2.0);
  for (const char* algorithm : {"speed", "memory"}) {
    expect_loss("--normalizer tokens --backward --algorithm " + std::string(algorithm), sum / kTokens);
  }
}

TEST_F(ProgramWithAHead, RunLinearCrossEntropyWritesTheGradientsThatAreNamed) {
  const std::string line = kHeadLine + std::string("--linear-bias bias --target soft ");
  for (const char* algorithm : {"--algorithm speed ", "--algorithm memory "}) {
    for (const std::string named : {"x", "linear_weight", "linear_bias", "x,linear_bias"}) {
      const Outcome outcome = run(line + algorithm + "--gradients " + named);
      ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
      for (const std::string name : {"x", "weight", "bias"}) {
        EXPECT_EQ(has_result("grad_" + name), named.find(name) != std::string::npos) << named << " " << name;
      }
    }
    ASSERT_EQ(run(line + algorithm + "--backward").exit_code, 0);
    double grad_bias[4] = {};
    for (int row = 0; row < 3; ++row) {
      float logits[4];
      logits_of_row(row, logits);
      const double lse = logsumexp(logits, 4);
      for (int v = 0; v < 4; ++v) grad_bias[v] += (std::exp(logits[v] - lse) - soft_[4 * row + v]) / 3.0;
    }
    for (std::size_t v = 0; v < 4; ++v) EXPECT_NEAR(read_result("grad_bias").values[v], grad_bias[v], 1e-6);
  }
}

TEST_F(ProgramWithAHead, WrongArgumentsOfLinearCrossEntropyAreNamed) {
  const std::string start = "eaves run linear_cross_entropy --output out.safetensors --input head.safetensors ";
  const std::string head = start + "--tensor x --linear-weight head --ignore-index 7 ";
  const std::string line = head + "--target targets ";
  expect_refusal("eaves run linear_cross_entropy", 2, "--input is required");
  expect_refusal(head, 2, "--target is required");
  expect_refusal(start + "--tensor x --target targets", 2, "--linear-weight is required");
  expect_refusal(line + "--linear-bias nothing", 2,
                 "--linear-bias: head.safetensors has no tensor \"nothing\", expected one of");
  expect_refusal(line + "--linear-bias ''", 2, "--linear-bias: is empty, expected a value");
  expect_refusal(line + "--weight nothing", 2, "--weight: head.safetensors has no tensor \"nothing\"");
  expect_refusal(line + "--normalizer nothing", 2, "--normalizer: head.safetensors has no tensor \"nothing\"");
  expect_refusal(line + "--grad upstream --backward", 2, "--backward excludes --grad");
  expect_refusal(line + "--gradients y", 2, "--gradients: y not in {x,linear_weight,linear_bias}");
  expect_refusal(line + "--gradients x,linear_bias", 2, "--gradients: has linear_bias, but --linear-bias is not given");
  expect_refusal(line + "--algorithm fast", 2, "--algorithm: fast not in {auto,speed,memory}");
  expect_refusal(line + "--workspace-limit -1", 2,
                 "--workspace-limit: is \"-1\", expected a number of bytes such as 4096, 64M or 2G");
  expect_refusal(line + "--reduction max", 2, "--reduction: max not in {none,sum,mean}");
  // The core's sentences, before anything is written.
  expect_refusal(start + "--tensor tokens --linear-weight head --target targets", 2,
                 "x has no axis, expected [..., features]");
  expect_refusal(start + "--tensor x --linear-weight bias --target targets", 2, "weight has ");
  expect_refusal(start + "--tensor x --linear-weight tokens --target targets --backward", 2, "weight has ");
  expect_refusal(line + "--linear-bias upstream --backward", 2,
                 "bias has shape [3], expected [4] (one per class of weight)");
  expect_refusal(line + "--grad upstream", 2, "grad_loss has ");
  expect_refusal(line + "--grad upstream --algorithm memory", 2, "grad_loss has ");
  expect_refusal(line + "--label-smoothing 1.5", 2, "label_smoothing is 1.5, expected 0 to 1");
  expect_refusal(start + "--tensor x --linear-weight head --target targets", 2,
                 "targets[1] is 7, expected 0 to 3, or ignore_index -100");
}

// A file as a user's program writes it: queries of a small batch, tokens first, and what makes their angles.
class ProgramWithQueries : public Program {
 protected:
  static constexpr int kBatch = 2, kTokens = 5, kHeads = 2, kFeatures = 4;

  void SetUp() override {
    Program::SetUp();
    if (HasFatalFailure()) return;
    for (std::size_t i = 0; i < std::size(queries_); ++i) queries_[i] = static_cast<float>(std::sin(1.0 + 7.0 * i));
    for (std::size_t i = 0; i < std::size(upstream_); ++i) upstream_[i] = static_cast<float>(std::cos(3.0 * i));
    AtomicFile file("test", (folder_ / "queries.safetensors").string());
    write_safetensors(
        file, {{"q", TensorView::contiguous(queries_, DType::float32, {kBatch, kTokens, kHeads, kFeatures})},
               {"g", TensorView::contiguous(upstream_, DType::float32, {kBatch, kTokens, kHeads, 2 * kFeatures})},
               {"theta", TensorView::contiguous(kAngles, DType::float32, {kHeads, 2})},
               {"offsets", TensorView::contiguous(kOffsets, DType::int64, {kBatch})},
               {"positions", TensorView::contiguous(kPositions, DType::int32, {kTokens})},
               {"starts", TensorView::contiguous(kStarts, DType::int32, {3})}});
    file.commit();
  }

  // Element d of head h of token n of batch entry b, in the file's order and in the other.
  static std::size_t tokens_first(int b, int n, int h, int d) {
    return static_cast<std::size_t>(((b * kTokens + n) * kHeads + h) * kFeatures + d);
  }
  static std::size_t heads_first(int b, int n, int h, int d) {
    return static_cast<std::size_t>(((b * kHeads + h) * kTokens + n) * kFeatures + d);
  }
  // The same element's cosine half in a tensor that is twice as wide; the sine half is kFeatures further.
  static std::size_t cosine_half(std::size_t element) {
    return element / kFeatures * 2 * kFeatures + element % kFeatures;
  }

  template <typename Body>
  static void for_each(const Body& body) {
    for (int b = 0; b < kBatch; ++b) {
      for (int n = 0; n < kTokens; ++n) {
        for (int h = 0; h < kHeads; ++h) {
          for (int d = 0; d < kFeatures; ++d) body(b, n, h, d);
        }
      }
    }
  }

  // `position(b, n, d)` is what theta is multiplied with, `activated(b, n, h, d)` the activation, of the same elements.
  template <typename Position, typename Activated>
  void expect_encoding(const std::string& options, const Position& position, const Activated& activated) const {
    const Outcome outcome = run("eaves run lrpe_cosine --input queries.safetensors --tensor q --theta theta " +
                                options + " --output out.safetensors");
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    const Result out = read_result("out");
    ASSERT_EQ(out.shape, (Dims{kBatch, kTokens, kHeads, 2 * kFeatures})) << options;
    for_each([&](int b, int n, int h, int d) {
      const double a = activated(b, n, h, d);
      const double phi = kAngles[2 * h + d % 2] * position(b, n, d);
      const std::size_t at = cosine_half(tokens_first(b, n, h, d));
      EXPECT_NEAR(out.values[at], a * std::cos(phi), 1e-6) << options << " token " << n << " feature " << d;
      EXPECT_NEAR(out.values[at + kFeatures], a * std::sin(phi), 1e-6) << options << " token " << n << " feature " << d;
    });
  }

  double x(int b, int n, int h, int d) const { return queries_[tokens_first(b, n, h, d)]; }
  double silu(int b, int n, int h, int d) const { return x(b, n, h, d) / (1.0 + std::exp(-x(b, n, h, d))); }

  // Over all tokens of a feature.
  double lse(int b, int h, int d) const {
    double sum = 0.0;
    for (int n = 0; n < kTokens; ++n) sum += std::exp(x(b, n, h, d));
    return std::log(sum);
  }

  // Two angles for four features: a sequence has none for the last two, a grid of two axes has two for each axis.
  static constexpr float kAngles[2 * kHeads] = {1.0f, 0.5f, 2.0f, -0.25f};
  static constexpr std::int64_t kOffsets[kBatch] = {100, -7};
  static constexpr std::int32_t kPositions[kTokens] = {9, 0, 4, -3, 1000};
  static constexpr std::int32_t kStarts[3] = {0, 2, kTokens};
  float queries_[kBatch * kTokens * kHeads * kFeatures] = {};
  float upstream_[2 * kBatch * kTokens * kHeads * kFeatures] = {};
};

TEST_F(ProgramWithQueries, RunLrpeCosineTakesEveryWayToGiveAPosition) {
  const auto none = [&](int b, int n, int h, int d) { return x(b, n, h, d); };
  const auto in_sequence = [](int d, double position) { return d < 2 ? position : 0.0; };
  expect_encoding(
      "", [&](int, int n, int d) { return in_sequence(d, n); }, none);
  expect_encoding(
      "--offset 41", [&](int, int n, int d) { return in_sequence(d, n + 41); }, none);
  expect_encoding(
      "--offset 1 --offsets offsets",
      [&](int b, int n, int d) { return in_sequence(d, static_cast<double>(n + 1 + kOffsets[b])); }, none);
  expect_encoding(
      "--positions positions", [&](int, int n, int d) { return in_sequence(d, kPositions[n]); }, none);
  expect_encoding(
      "--cu-seqlens starts", [&](int, int n, int d) { return in_sequence(d, n < 2 ? n : n - 2); }, none);
  expect_encoding(
      "--grid 5", [&](int, int n, int d) { return in_sequence(d, n); }, none);
  expect_encoding(
      "--extra-tokens 2", [&](int, int n, int d) { return in_sequence(d, n < 2 ? 0 : n - 2); }, none);
  expect_encoding(
      "--grid 2,2 --extra-tokens 1 --offset 3",
      [](int, int n, int d) { return n == 0 ? 0 : 3 + (d < 2 ? (n - 1) / 2 : (n - 1) % 2); }, none);
}

TEST_F(ProgramWithQueries, RunLrpeCosineTakesEveryActivation) {
  const auto position = [](int, int n, int d) { return d < 2 ? n : 0; };
  expect_encoding("--activation none", position, [&](int b, int n, int h, int d) { return x(b, n, h, d); });
  expect_encoding("--activation relu", position,
                  [&](int b, int n, int h, int d) { return std::max(x(b, n, h, d), 0.0); });
  expect_encoding("--activation sigmoid", position,
                  [&](int b, int n, int h, int d) { return 1.0 / (1.0 + std::exp(-x(b, n, h, d))); });
  expect_encoding("--activation silu", position, [&](int b, int n, int h, int d) { return silu(b, n, h, d); });
  expect_encoding("--activation softmax", position, [&](int b, int n, int h, int d) {
    double sum = 0.0;
    for (int i = 0; i < kFeatures; ++i) sum += std::exp(x(b, n, h, i));
    return std::exp(x(b, n, h, d)) / sum;
  });
  EXPECT_FALSE(has_result("lse")) << "the backward of a softmax over the features needs none";
  expect_encoding("--activation softmax --activation-dim -2", position,
                  [&](int b, int n, int h, int d) { return std::exp(x(b, n, h, d) - lse(b, h, d)); });
  const Result result = read_result("lse");
  EXPECT_EQ(result.shape, (Dims{kBatch, kHeads, 2, kFeatures}));
  for_each([&](int b, int, int h, int d) {
    const auto at = static_cast<std::size_t>((b * kHeads + h) * 2 * kFeatures + d);
    EXPECT_NEAR(result.values[at], lse(b, h, d), 1e-6);
    EXPECT_NEAR(result.values[at + kFeatures], lse(b, h, d) - result.values[at], 1e-6) << "what rounding has lost";
  });
  EXPECT_FALSE(has_result("grad_x")) << "nobody asked for it";
}

TEST_F(ProgramWithQueries, RunLrpeCosineWritesTheGradientsOfXAndTheta) {
  const auto position = [](int, int n, int d) { return d < 2 ? n : 0; };
  double grad_theta[2 * kHeads] = {};
  const auto angle = [&](int b, int n, int h, int d) { return kAngles[2 * h + d % 2] * position(b, n, d); };
  // dL/da, of which the sum over a softmax's row goes into each of its elements.
  const auto grad_a = [&](int b, int n, int h, int d) {
    const float* g = upstream_ + cosine_half(tokens_first(b, n, h, d));
    return g[0] * std::cos(angle(b, n, h, d)) + g[kFeatures] * std::sin(angle(b, n, h, d));
  };
  const auto softmax = [&](int b, int n, int h, int d) { return std::exp(x(b, n, h, d) - lse(b, h, d)); };
  const auto silu_of = [&](int b, int n, int h, int d) { return silu(b, n, h, d); };
  const auto add_to_grad_theta = [&](int b, int n, int h, int d, double a) {
    const float* g = upstream_ + cosine_half(tokens_first(b, n, h, d));
    const double phi = angle(b, n, h, d);
    grad_theta[2 * h + d % 2] += position(b, n, d) * a * (g[kFeatures] * std::cos(phi) - g[0] * std::sin(phi));
  };
  const auto expect_grad_theta = [&] {
    const Result result = read_result("grad_theta");
    EXPECT_EQ(result.shape, (Dims{kHeads, 2}));
    for (std::size_t i = 0; i < std::size(grad_theta); ++i) EXPECT_NEAR(result.values[i], grad_theta[i], 1e-5);
  };

  expect_encoding("--activation silu --grad g", position, silu_of);
  EXPECT_EQ(read_result("grad_x").shape, (Dims{kBatch, kTokens, kHeads, kFeatures}));
  for_each([&](int b, int n, int h, int d) {
    const double sigmoid = 1.0 / (1.0 + std::exp(-x(b, n, h, d)));
    const double slope = sigmoid * (1.0 + x(b, n, h, d) * (1.0 - sigmoid));
    EXPECT_NEAR(read_result("grad_x").values[tokens_first(b, n, h, d)], slope * grad_a(b, n, h, d), 1e-6);
    add_to_grad_theta(b, n, h, d, silu(b, n, h, d));
  });
  expect_grad_theta();

  std::fill(std::begin(grad_theta), std::end(grad_theta), 0.0);
  expect_encoding("--activation softmax --activation-dim -2 --grad g", position, softmax);
  for_each([&](int b, int n, int h, int d) {
    double sum = 0.0;
    for (int i = 0; i < kTokens; ++i) sum += softmax(b, i, h, d) * grad_a(b, i, h, d);
    EXPECT_NEAR(read_result("grad_x").values[tokens_first(b, n, h, d)],
                softmax(b, n, h, d) * (grad_a(b, n, h, d) - sum), 1e-6);
    add_to_grad_theta(b, n, h, d, softmax(b, n, h, d));
  });
  expect_grad_theta();
}

TEST_F(ProgramWithQueries, RunLrpeCosineTakesHeadsFirstToo) {
  const std::string options =
      " --theta theta --activation softmax --activation-dim -2 --grad g --output out.safetensors";
  ASSERT_EQ(run("eaves run lrpe_cosine --input queries.safetensors --tensor q" + options).exit_code, 0);
  const Result out = read_result("out"), lse = read_result("lse"), grad_x = read_result("grad_x");
  const Result grad_theta = read_result("grad_theta");

  float queries[std::size(decltype(queries_){})], upstream[std::size(decltype(upstream_){})];
  for_each([&](int b, int n, int h, int d) {
    const std::size_t from = tokens_first(b, n, h, d), to = heads_first(b, n, h, d);
    queries[to] = queries_[from];
    for (const int half : {0, kFeatures}) upstream[cosine_half(to) + half] = upstream_[cosine_half(from) + half];
  });
  AtomicFile file("test", (folder_ / "heads_first.safetensors").string());
  write_safetensors(file,
                    {{"q", TensorView::contiguous(queries, DType::float32, {kBatch, kHeads, kTokens, kFeatures})},
                     {"g", TensorView::contiguous(upstream, DType::float32, {kBatch, kHeads, kTokens, 2 * kFeatures})},
                     {"theta", TensorView::contiguous(kAngles, DType::float32, {kHeads, 2})}});
  file.commit();
  const Outcome outcome =
      run("eaves run lrpe_cosine --layout bhnd --input heads_first.safetensors --tensor q" + options);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(read_result("out").shape, (Dims{kBatch, kHeads, kTokens, 2 * kFeatures}));
  EXPECT_EQ(read_result("grad_x").shape, (Dims{kBatch, kHeads, kTokens, kFeatures}));
  for_each([&](int b, int n, int h, int d) {
    const std::size_t from = tokens_first(b, n, h, d), to = heads_first(b, n, h, d);
    EXPECT_NEAR(read_result("grad_x").values[to], grad_x.values[from], 1e-6);
    for (const int half : {0, kFeatures}) {
      EXPECT_NEAR(read_result("out").values[cosine_half(to) + half], out.values[cosine_half(from) + half], 1e-6);
    }
  });
  EXPECT_EQ(read_result("lse").shape, lse.shape);
  for (std::size_t i = 0; i < lse.values.size(); ++i) EXPECT_NEAR(read_result("lse").values[i], lse.values[i], 1e-6);
  for (std::size_t i = 0; i < grad_theta.values.size(); ++i) {
    EXPECT_NEAR(read_result("grad_theta").values[i], grad_theta.values[i], 1e-5);
  }
}

TEST_F(ProgramWithQueries, WrongArgumentsOfLrpeCosineAreNamed) {
  const std::string start = "eaves run lrpe_cosine --output out.safetensors --input queries.safetensors --tensor ";
  const std::string line = start + "q --theta theta ";
  expect_refusal("eaves run lrpe_cosine", 2, "--input is required");
  expect_refusal(start + "q", 2, "--theta is required");
  expect_refusal(start + "nothing --theta theta", 2, "--tensor: queries.safetensors has no tensor \"nothing\"");
  expect_refusal(start + "q --theta nothing", 2, "--theta: queries.safetensors has no tensor \"nothing\"");
  for (const std::string name : {"offsets", "positions", "cu-seqlens", "grad"}) {
    expect_refusal(line + "--" + name + " nothing", 2, "--" + name + ": queries.safetensors has no tensor \"nothing\"");
    expect_refusal(line + "--" + name + " ''", 2, "--" + name + ": is empty, expected a value");
  }
  expect_refusal(line + "--grid ''", 2, "--grid: is empty, expected a value");
  expect_refusal(line + "--grid 5,x", 2, "--grid: is \"5,x\", expected up to 16 sizes such as 8 or 4,8,8");
  expect_refusal(line + "--layout nhd", 2, "--layout: nhd not in {bnhd,bhnd}");
  expect_refusal(line + "--activation tanh", 2, "--activation: tanh not in {none,relu,sigmoid,silu,softmax}");
  expect_refusal(line + "--offset far", 2, "--offset");
  expect_refusal(start + "theta --theta theta", 2,
                 "lrpe_cosine: x has shape [2, 2], expected four axes (batch, positions, heads, features)");
  expect_refusal(start + "theta --theta theta --layout bhnd", 2,
                 "lrpe_cosine: x has shape [2, 2], expected four axes (batch, heads, positions, features)");
  expect_refusal(line + "--grad theta", 2, "lrpe_cosine: grad_out has shape [2, 2], expected four axes");
  // The core's sentences, before anything is written.
  expect_refusal(line + "--layout bhnd", 2, "theta has 2 heads, expected 5 (as x) or 1");
  expect_refusal(line + "--grid 2,3", 2, "grid is [2, 3], expected sizes whose product is 5");
  expect_refusal(line + "--extra-tokens 6", 2, "extra_tokens is 6, expected 0 to the number of positions, 5");
  expect_refusal(line + "--activation-dim 1", 2,
                 "activation_dim is 1, expected -1 (the features) or -2 (the sequence)");
  expect_refusal(line + "--positions theta", 2, "positions has dtype float32, expected int64 or int32");
  expect_refusal(line + "--positions positions --offset 1", 2, "positions is given beside an offset");
  expect_refusal(line + "--positions positions --cu-seqlens starts", 2, "cu_seqlens is given beside positions");
  expect_refusal(line + "--cu-seqlens positions", 2, "cu_seqlens has 9 at index 0");
  expect_refusal(line + "--cu-seqlens starts --activation softmax --activation-dim -2", 3,
                 "cu_seqlens is given with a softmax over the sequence");
  expect_refusal(line + "--grad q", 2,
                 "lrpe_cosine: grad_out has shape [2, 5, 2, 4], expected [2, 5, 2, 8] (that of out)");
}

TEST_F(Program, RunReplacesAnEarlierOutputAndFollowsALink) {
  write_file("target", "old");
  fs::create_symlink("target", folder_ / "out.safetensors");
  ASSERT_EQ(run("eaves run logsumexp --input in.safetensors --tensor x --output out.safetensors").exit_code, 0);
  EXPECT_TRUE(fs::is_symlink(folder_ / "out.safetensors"));
  EXPECT_EQ(read_result("out").values.size(), 1u);
  EXPECT_EQ(temporary_files(), 0);
}

TEST_F(Program, WrongRunArgumentsAreNamed) {
  const std::string run_x = "eaves run logsumexp --input in.safetensors --tensor x ";
  const std::string out = " --output out.safetensors";
  expect_refusal("eaves run", 2, "subcommand is required");
  expect_refusal("eaves run logsumexp", 2, "--input is required");
  expect_refusal(run_x, 2, "--output is required");
  expect_refusal(run_x + "--dims one" + out, 2, "--dims: is \"one\", expected up to 16 axes such as -1 or 0,2");
  expect_refusal(run_x + "--dims 0," + out, 2, "--dims: is \"0,\"");
  expect_refusal(run_x + "--dims 2" + out, 2, "2");
  expect_refusal(run_x + "--dims 0,0" + out, 2, "logsumexp");
  expect_refusal(run_x + "--dtype int8" + out, 2, "out has dtype int8");
  expect_refusal(run_x + "--grad wide" + out, 2, "grad_out");
  expect_refusal(
      "eaves run logsumexp --input in.safetensors --tensor y" + out, 2,
      "--tensor: in.safetensors has no tensor \"y\", expected one of: \"flags\", \"g\", \"head\", \"logits\"");
  expect_refusal("eaves run logsumexp --input in.safetensors --tensor small" + out, 2,
                 "--tensor: tensor \"small\" of in.safetensors has dtype F8_E4M3, which is unsupported");
  expect_refusal(run_x + "--output in.safetensors", 2, "--output: in.safetensors is the input file");
  expect_refusal(run_x + "--output ./../" + folder_.filename().string() + "/in.safetensors", 2, "is the input file");
  expect_refusal(run_x + "--output .", 2, "--output: . exists and is not a regular file");
  expect_refusal(run_x + "--output nowhere/out.safetensors", 2, "--output: nowhere/out.safetensors cannot be written");
}

TEST_F(Program, InputThatIsNoSafetensorsFileIsRefused) {
  const auto with_input = [](const std::string& input) {
    return "eaves run logsumexp --input " + input + " --tensor x --output out.safetensors";
  };
  write_file("empty", "");
  write_file("text", "Not a file of tensors, but long enough to have a length.");
  std::string cut = read_text(folder_ / "in.safetensors");
  cut.pop_back();
  write_file("cut", cut);
  ASSERT_EQ(mkfifo((folder_ / "fifo").c_str(), 0600), 0);
  expect_refusal(with_input("missing"), 2, "--input: missing cannot be read: No such file or directory");
  expect_refusal(with_input("."), 2, "--input: . is a folder, expected a file");
  expect_refusal(with_input("fifo"), 2, "--input: fifo is not a regular file");
  expect_refusal(with_input("empty"), 2, "empty: has 0 bytes, too few for a safetensors file");
  expect_refusal(with_input("text"), 2, "text: the header length is");
  expect_refusal(with_input("cut"), 2, "cut: \"small\" ends at byte 259 of the data, but the file has only 258");
}

// 128 MiB of zeros that take no room on the disk: long enough to be caught in the middle.
void write_large_input(const fs::path& path) {
  const std::string header = R"({"g":{"dtype":"F32","shape":[32],"data_offsets":[0,128]},)"
                             R"("x":{"dtype":"F32","shape":[32,1048576],"data_offsets":[128,134217856]}})";
  std::string length(8, '\0');
  length[0] = static_cast<char>(header.size());
  std::ofstream(path, std::ios::binary) << length << header;
  fs::resize_file(path, 8 + header.size() + 134217856);
}

const std::vector<const char*> kLargeRun = {"run",      "logsumexp", "--input",  "large.safetensors",
                                            "--tensor", "x",         "--dims",   "-1",
                                            "--grad",   "g",         "--output", "out.safetensors"};

TEST_F(Program, RunThatIsKilledLeavesNoHalfFile) {
  write_large_input(folder_ / "large.safetensors");
  const pid_t child = start(kLargeRun);
  // The temporary file appears before the work begins.
  wait_until([&] { return temporary_files() == 1; });
  EXPECT_EQ(kill(child, SIGKILL), 0);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status)) << "the run was over before it could be killed";
  EXPECT_FALSE(fs::exists(folder_ / "out.safetensors"));
}

TEST_F(Program, RunThatIsStoppedLeavesNoFileAtAll) {
  write_large_input(folder_ / "large.safetensors");
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const pid_t child = start(kLargeRun);
    wait_until([&] { return temporary_files() == 1; });
    const Outcome outcome = stop(child, signal);
    EXPECT_EQ(outcome.exit_code, 130) << strsignal(signal);
    EXPECT_EQ(outcome.err, "eaves: stopped at once\n");
    EXPECT_EQ(temporary_files(), 0);
    EXPECT_FALSE(fs::exists(folder_ / "out.safetensors"));
  }
}

TEST_F(Program, BenchThatIsStoppedWritesWhatItHasMeasured) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const pid_t child =
        start({"bench", "--device", "cpu", "--repetitions", "5", "--warm-up-ms", "0", "--json", "all.json"});
    // The first table of several.
    wait_until([&] { return read_text(folder_ / "stdout.txt").find("-speed-") != std::string::npos; });
    const Outcome outcome = stop(child, signal);
    EXPECT_EQ(outcome.exit_code, 130) << strsignal(signal);
    EXPECT_EQ(outcome.out.back(), '\n');
    EXPECT_EQ(temporary_files(), 0);
    const auto json = nlohmann::json::parse(read_text(folder_ / "all.json"));
    EXPECT_EQ(json["stopped"], true);
    const std::size_t rows = json["rows"].size() / 2;  // of eaves and of the limit
    EXPECT_GE(rows, 1u);
    const std::string place = fmt::format("what was measured, {} row{}, is in all.json", rows, rows == 1 ? "" : "s");
    EXPECT_EQ(outcome.err, fmt::format("eaves: stopped; {}\n", place));
    fs::remove(folder_ / "all.json");
  }
}

TEST_F(Program, BenchThatIsStoppedBeforeTheFirstRowLeavesTheOldFile) {
  write_file("old.json", "old");
  const pid_t child = start({"bench", "logsumexp", "--device", "cpu", "--warm-up-ms", "60000", "--json", "old.json"});
  wait_until([&] { return temporary_files() == 1; });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // into the warm-up, or just before it
  const Outcome outcome = stop(child, SIGTERM);
  EXPECT_EQ(outcome.exit_code, 130);
  EXPECT_EQ(outcome.err, "eaves: stopped before a row was measured; nothing is written\n");
  EXPECT_EQ(read_text(folder_ / "old.json"), "old");
  EXPECT_EQ(temporary_files(), 0);
}

TEST_F(Program, SecondSignalEndsItAtOnceButTwoInARowAreOne) {
  const auto signal_twice = [&](int pause_ms) {
    const AtomicFile file("test", (folder_ / "result.json").string());
    handle_stop_signals();
    defer_stop();
    raise(SIGINT);
    std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
    raise(SIGINT);
    std::_Exit(is_stop_wanted() ? 0 : 1);
  };
  EXPECT_EXIT(signal_twice(0), testing::ExitedWithCode(0), "");
  fs::remove(*fs::directory_iterator(folder_));
  EXPECT_EXIT(signal_twice(500), testing::ExitedWithCode(130), "^eaves: stopped at once\n$");
}

}  // namespace
}  // namespace eaves::cli
