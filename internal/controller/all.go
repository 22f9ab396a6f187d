package controller

import (
	"k8s.io/apimachinery/pkg/runtime"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/ashlar-gpu/ashlar/api/v1alpha1"
	"github.com/ashlar-gpu/ashlar/internal/mig"
)

// Options are the settings of the controllers.
type Options struct {
	// OnDemand bounds how often GPUs are cut.
	OnDemand mig.OnDemandPolicy
}

// Scheme returns the kinds that the controllers know.
func Scheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	if err := clientscheme.AddToScheme(scheme); err != nil {
		return nil, err
	}
	return scheme, v1alpha1.AddToScheme(scheme)
}

// Add adds all controllers to a manager, which has the Scheme.
func Add(m ctrl.Manager, o Options) error {
	return newOnDemand(m.GetClient(), m.GetEventRecorder("ashlar-controller"), o.OnDemand).add(m)
}
