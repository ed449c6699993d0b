// Compares every kernel, of every instruction set of this CPU, with plain loops in double. Built with sanitizers by
// `make sanitize`.
#include <chrono>

#include "runtime/isa.h"
#include "runtime/pool.h"
#include "tests/check.h"

namespace chairlift::test {

static void run(const char* name, void (*test)()) {
  const auto start = std::chrono::steady_clock::now();
  test();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::printf("%-12s %-10s passed in %.1f s\n", isa().name, name, seconds.count());
  std::fflush(stdout);
}

}  // namespace chairlift::test

#ifdef __SANITIZE_ADDRESS__
// Undefined behaviour in kernels executes a trap (CMakeLists.txt), whose stack is printed: SIGILL on x86, SIGTRAP on Arm.
extern "C" const char* __asan_default_options() { return "handle_sigill=1:handle_sigtrap=1"; }
#endif

int main() {
  using namespace chairlift;
  test::run("pool", test::test_pool);
  for (const std::string& name : available_isas()) {
    set_isa(name);
    Pool::get().set_num_threads(3);
    test::run("linear", test::test_linear);
    test::run("residual", test::test_residual_sum);
    // A mixture has no functions of an instruction set beside those of its layers.
    if (name == available_isas().front()) test::run("mixture", test::test_mixture);
    if (test::is_new(isa().lora)) test::run("lora", test::test_lora);
    if (test::is_new(isa().recurrence)) test::run("recurrence", test::test_recurrence);
    if (test::is_new(isa().attention)) test::run("attention", test::test_attention);
    if (!test::kOnlyRaces && test::is_new(isa().sampling)) test::run("sampling", test::test_sampling);
  }
  return 0;
}
