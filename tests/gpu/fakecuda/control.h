// How tests steer the stand-in and look into it: C functions of the same library, for ctypes.
#pragma once

#include <string>
#include <vector>

#include "state.h"

namespace fakecuda {

// "cuMemAlloc:2" fails every cuMemAlloc with error 2; "cuMemAlloc:2:3" only the third from now on;
// "*" stands for any call but those that restore a thread's context and capture mode, after whose
// failure nothing could be put right. FAKECUDA_FAIL in the environment is the first failure.
struct Failure {
  std::string call;
  Result result = kSuccess;
  int occurrence = 0;  // 0: all
  int seen = 0;
};

struct Control {
  std::vector<std::string> log;  // names of calls; "=code" follows where one failed
  Failure failure;
  std::string last_error;  // why a kernel failed

  Result failure_of(const char* call);
};

Control& control();

}  // namespace fakecuda
